from dataclasses import fields, replace

import pytest
from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser

from troll_lab.tasks import Task, TaskConfig, TaskError, load_task, register_task
from troll_lab.tasks import registry as registry_module
from troll_lab.tasks.registry import least_train_size


def rows_of(count, **columns):
    return Dataset.from_dict({"prompt": ["a"] * count} | {name: [text] * count for name, text in columns.items()})


@pytest.fixture
def task_of(monkeypatch):
    """Registers a task `made:<word>` with these fields, and returns its configuration."""

    def register(train, held_out, trains=True, **fields):
        others = {name: each for name, each in registry_module._LOADERS.items() if name != "made"}
        monkeypatch.setattr(registry_module, "_LOADERS", others)
        register_task("made:<word>", trains=trains)(
            lambda config, argument: Task(argument, train, held_out, **{"reward_funcs": [len], **fields})
        )
        return TaskConfig("made:up")

    return register


def test_registered_task_is_loaded_by_name(task_of):
    config = task_of(rows_of(2, hint="x"), rows_of(1))
    plain, chat = (load_task(config, conversational=each) for each in (False, True))
    assert (plain.name, plain.reward_funcs) == ("up", [len])
    assert plain.train_dataset[1] == {"prompt": "a", "hint": "x"}
    assert chat.train_dataset[1] == {"prompt": [{"role": "user", "content": "a"}], "hint": "x"}
    assert chat.eval_dataset[0] == {"prompt": [{"role": "user", "content": "a"}]}
    assert (chat.train_questions, chat.held_out_questions) == (["a", "a"], ["a"])  # the prompts, by default
    with pytest.raises(ValueError, match="'made' is registered already"):
        register_task("made")


def test_conversations_may_have_prompts_of_their_own(task_of):
    rows = rows_of(1, chat_prompt="Say a.", prefix="p")
    config = task_of(rows, rows, system_prompt="Be brief.")
    plain, chat = (load_task(config, conversational=each).train_dataset for each in (False, True))
    assert plain[0] == {"prompt": "Be brief.\n\na", "prefix": "p"}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a."}]
    assert chat[0] == {"prompt": said, "prefix": "p"}


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        (False, "'made:up' is a benchmark, without rows to train on; train on one of .*gsm8k"),
        (True, "'made:up' has no train rows left: check its data and train_size"),
    ],
)
def test_load_task_needs_train_rows_only_for_training(task_of, trains, message):
    config = task_of(rows_of(0), rows_of(2), trains=trains)
    for conversational in (False, True):
        assert len(load_task(config, conversational=conversational).train_dataset) == 0
    with pytest.raises(TaskError, match=message):
        load_task(config, for_training=True)
    with pytest.raises(TaskError, match="'made:up' has no eval rows left"):
        load_task(task_of(rows_of(2), rows_of(0)))


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
)
def test_column_that_rewards_cannot_get_is_named(task_of, name):
    for rows in ((rows_of(1, **{name: "x"}), rows_of(1)), (rows_of(1), rows_of(1, **{name: "x"}))):
        with pytest.raises(TaskError, match=f"'made:up': the data set cannot have a column named '{name}': .*Rename"):
            load_task(task_of(*rows))


@pytest.mark.parametrize(("weights", "expected"), [(None, None), ([0.5], [0.5, 1.0])])
def test_reward_model_has_a_weight_of_its_own(task_of, monkeypatch, weights, expected):
    monkeypatch.setattr("troll_lab.tasks.loading.load_reward_model", lambda name, conversational: name)
    config = replace(task_of(rows_of(1), rows_of(1), reward_weights=weights), reward_model="judge")
    task = load_task(config)
    assert (task.reward_funcs, task.reward_weights) == ([len, "judge"], expected)


def test_reward_model_that_cannot_be_loaded_is_a_task_error(task_of, tmp_path):
    with pytest.raises(TaskError, match="cannot load the reward model"):
        load_task(replace(task_of(rows_of(1), rows_of(1)), reward_model=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gsm9k",
            r"unknown task 'gsm9k', did you mean gsm8k\? known tasks: .*prompts\[:<hub data set>\], .*; or the path",
        ),
        ("", "unknown task ''"),
        ("gsm8k:hard", "not of the form 'gsm8k'"),
        ("gsm8k:", "not of the form 'gsm8k'"),
        ("reasoning_gym", "not of the form 'reasoning_gym:<data set>'"),
        ("reasoning_gym:", "not of the form 'reasoning_gym:<data set>'"),
    ],
)
def test_unknown_task_names_are_refused(name, message):
    with pytest.raises(TaskError, match=message):
        load_task(TaskConfig(task=name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_options": "{max_terms: 3"}, "task_options is not valid JSON"),
        ({"task_options": "[3]"}, "task_options must be a JSON object"),
        ({"warm_up": "{max_steps: 3"}, "warm_up is not valid JSON"),
        ({"warm_up": 3}, "warm_up must be a JSON object"),
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"eval_size": -1}, "eval_size must be at least 1, got -1"),
        ({"eval_tasks": [{"dataset_path": "x"}]}, "eval_tasks takes names, or mappings with task"),
        ({"eval_tasks": [{"task": "math", "eval_size": 3}]}, "eval_tasks takes names, or mappings with task"),
        ({"eval_tasks": [{"task": "math", "task_options": 3}]}, "task_options must be"),
    ],
)
def test_task_config_refuses(arguments, message):
    with pytest.raises(TaskError, match=message):
        TaskConfig(**arguments)


@pytest.fixture
def parsed(tmp_path):
    """The configuration that a recipe and the command line after it make, in one parser with TRL's."""

    def parse(text, *arguments):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text)
        parser = TrlParser([TaskConfig, ModelConfig])  # type: ignore[list-item]
        return parser.parse_args_and_config(["--config", str(recipe), *arguments])[0]

    return parse


@pytest.mark.parametrize(
    ("text", "arguments", "config"),
    [
        (
            "{}",
            ["--task", "reasoning_gym:gcd", "--task_options", '{"max_terms": 3}', "--train_size", "7"],
            TaskConfig("reasoning_gym:gcd", task_options={"max_terms": 3}, train_size=7),
        ),
        (
            "task: math500\ndataset_path: data\neval_size: null\ntask_options:\n  max_terms: 3\n",
            [],
            TaskConfig("math500", "data", {"max_terms": 3}, eval_size=None),
        ),
        ("task: math500\neval_size: null\n", ["--eval_size", "7"], TaskConfig("math500", eval_size=7)),
    ],
)
def test_task_config_is_parsed_from_yaml_and_arguments(parsed, text, arguments, config):
    assert parsed(text, *arguments) == config
    assert config.options == (config.task_options or {})


def test_eval_tasks_are_names_paths_or_mappings(parsed):
    text = "eval_tasks:\n- amc23=a.jsonl\n- {task: math500, task_options: {answer_format: tag}}\n"
    assert parsed(text, "--eval_size", "7").other_tasks() == [
        TaskConfig("amc23", "a.jsonl", train_size=1, eval_size=7),
        TaskConfig("math500", task_options={"answer_format": "tag"}, train_size=1, eval_size=7),
    ]
    for text in ("eval_tasks: own.yaml", "eval_tasks: [own.yaml]"):
        assert parsed(text).other_tasks() == [TaskConfig("own.yaml")]


@pytest.mark.parametrize(
    ("name", "short", "size"),
    [
        ("my tasks/own.yaml", "own", None),
        ("./a/sort.py:8", "sort-8", None),
        ("reasoning_gym:gcd", "reasoning_gym:gcd", 1),
    ],
)
def test_files_have_short_names_and_are_loaded_whole(name, short, size):
    task = Task(name, rows_of(1), rows_of(1), [])
    assert (task.short_name, least_train_size(name)) == (short, size)


def test_fields_of_task_config_are_not_trls_and_have_help():
    trls = {field.name for config in (GRPOConfig, ModelConfig) for field in fields(config)}
    assert not trls & {field.name for field in fields(TaskConfig)}
    assert all("help" in field.metadata for field in fields(TaskConfig))
