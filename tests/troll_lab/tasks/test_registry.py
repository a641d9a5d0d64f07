from dataclasses import fields, replace

import pytest
import yaml
from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser

from troll_lab.tasks import Task, TaskConfig, TaskError, load_task, register_task
from troll_lab.tasks import registry as registry_module
from troll_lab.tasks.registry import least_train_size


@pytest.fixture
def echo_task(monkeypatch):
    monkeypatch.setattr(registry_module, "_LOADERS", dict(registry_module._LOADERS))

    def success(prompts, completions, **columns):
        return [float(completion == "yes") for completion in completions]

    @register_task("echo:<word>")
    def load(config: TaskConfig, argument: str) -> Task:
        rows = Dataset.from_dict({"prompt": [argument] * 3, "hint": ["a", "b", "c"]})
        return Task(name=config.task, train_dataset=rows, eval_dataset=rows, reward_funcs=[success])


def test_a_new_task_is_one_registration(echo_task):
    task = load_task(TaskConfig(task="echo:hello"))
    assert task.train_dataset["prompt"] == ["hello"] * 3
    assert task.reward_funcs[0](prompts=["hello"], completions=["yes"]) == [1.0]


def test_conversational_prompts_keep_the_other_columns(echo_task):
    task = load_task(TaskConfig(task="echo:hello"), conversational=True)
    for rows in (task.train_dataset, task.eval_dataset):
        assert rows[2] == {"prompt": [{"role": "user", "content": "hello"}], "hint": "c"}


def rows_of(count, **columns):
    return Dataset.from_dict({"prompt": ["a"] * count} | {name: [text] * count for name, text in columns.items()})


@pytest.fixture
def task_of(monkeypatch):
    """Registers a task `made` with these fields."""

    def register(train, held_out, trains=True, **fields):
        others = {name: each for name, each in registry_module._LOADERS.items() if name != "made"}
        monkeypatch.setattr(registry_module, "_LOADERS", others)
        task = Task("made", train, held_out, reward_funcs=[len], **fields)
        register_task("made", trains=trains)(lambda config, argument: task)

    return register


def test_prompts_may_read_otherwise_in_a_conversation(task_of):
    rows = rows_of(1, chat_prompt="Say a.", prefix="p")
    task_of(rows, rows, system_prompt="Be brief.")
    plain, chat = (load_task(TaskConfig("made"), conversational=each).train_dataset for each in (False, True))
    assert plain[0] == {"prompt": "Be brief.\n\na", "prefix": "p"}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a."}]
    assert chat[0] == {"prompt": said, "prefix": "p"}


def test_load_task_needs_rows_to_train_on_only_for_training(task_of):
    rows, none = rows_of(2), rows_of(0)
    config = TaskConfig("made")
    for trains, message in [
        (False, "'made' is a benchmark, without rows to train on; train on one of .*gsm8k"),
        (True, "'made' has no train rows left: check its data and train_size"),
    ]:
        task_of(none, rows, trains=trains)
        for conversational in (False, True):
            assert len(load_task(config, conversational=conversational).train_dataset) == 0
        with pytest.raises(TaskError, match=message):
            load_task(config, for_training=True)
    task_of(rows, none)
    with pytest.raises(TaskError, match="'made' has no eval rows left"):
        load_task(TaskConfig("made"))


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
)
def test_a_column_that_rewards_cannot_get_is_named(task_of, name):
    for rows in ((rows_of(1, **{name: "x"}), rows_of(1)), (rows_of(1), rows_of(1, **{name: "x"}))):
        task_of(*rows)
        with pytest.raises(TaskError, match=f"task 'made': the data set cannot have a column named '{name}': .*Rename"):
            load_task(TaskConfig("made"))


def test_load_task_gives_a_reward_model_a_weight_of_its_own(task_of, monkeypatch):
    monkeypatch.setattr("troll_lab.tasks.loading.load_reward_model", lambda name, conversational: name)
    rows = rows_of(1)
    for weights, expected in ((None, None), ([0.5], [0.5, 1.0])):
        task_of(rows, rows, reward_weights=weights)
        task = load_task(TaskConfig("made", reward_model="judge"))
        assert (task.reward_funcs, task.reward_weights) == ([len, "judge"], expected)


def test_registering_a_prefix_twice_is_an_error(echo_task):
    with pytest.raises(ValueError, match="'echo' is registered already"):
        register_task("echo")


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
def test_unknown_names_are_one_line_errors(name, message):
    with pytest.raises(TaskError, match=message) as error:
        load_task(TaskConfig(task=name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task_options": "{max_terms: 3"}, "not valid JSON"),
        ({"task_options": "[3]"}, "must be a JSON object"),
        ({"warm_up": "{max_steps: 3"}, "warm_up is not valid JSON"),
        ({"warm_up": 3}, "warm_up must be a JSON object"),
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"eval_size": -1}, "eval_size must be at least 1, got -1"),
        ({"eval_tasks": [{"dataset_path": "x"}]}, "eval_tasks takes names, or mappings with task"),
        ({"eval_tasks": [{"task": "math", "eval_size": 3}]}, "eval_tasks takes names, or mappings with task"),
        ({"eval_tasks": [{"task": "math", "task_options": 3}]}, "task_options must be"),
    ],
)
def test_config_refuses(arguments, message):
    with pytest.raises(TaskError, match=message) as error:
        TaskConfig(**arguments)
    assert "\n" not in str(error.value)


def parsed(tmp_path, text, *arguments):
    """The configuration that a recipe and the command line after it make."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    parser = TrlParser([TaskConfig])  # type: ignore[list-item]
    (config,) = parser.parse_args_and_config(["--config", str(recipe), *arguments])
    return config


def test_config_parses_from_the_command_line_with_those_of_trl():
    parser = TrlParser([TaskConfig, ModelConfig])  # type: ignore[list-item]
    config, _ = parser.parse_args_and_config(
        ["--task", "reasoning_gym:gcd", "--task_options", '{"max_terms": 3}', "--train_size", "7"]
    )
    assert config == TaskConfig(task="reasoning_gym:gcd", task_options={"max_terms": 3}, train_size=7)
    assert config.options == {"max_terms": 3}
    assert TaskConfig().options == {}


def test_config_parses_from_yaml(tmp_path):
    text = "task: math500\ndataset_path: data\neval_size: null\ntask_options:\n  max_terms: 3\n"
    config = TaskConfig("math500", "data", eval_size=None, task_options={"max_terms": 3})
    assert parsed(tmp_path, text) == config
    assert parsed(tmp_path, text, "--eval_size", "7") == replace(config, eval_size=7)


def test_other_tasks_are_names_paths_or_mappings(tmp_path):
    text = "eval_tasks:\n- amc23=a.jsonl\n- {task: math500, task_options: {answer_format: tag}}\n"
    assert parsed(tmp_path, text, "--eval_size", "7").other_tasks() == [
        TaskConfig("amc23", "a.jsonl", train_size=1, eval_size=7),
        TaskConfig("math500", task_options={"answer_format": "tag"}, train_size=1, eval_size=7),
    ]
    for given in ("own.yaml", ["own.yaml"]):
        config = parsed(tmp_path, yaml.safe_dump({"eval_tasks": given}))
        assert config.other_tasks() == [TaskConfig("own.yaml")]


def test_files_are_called_by_their_stem_and_loaded_whole():
    for name, short, size in (
        ("my tasks/own.yaml", "own", None),
        ("./a/sort.py:8", "sort-8", None),
        ("reasoning_gym:gcd", "reasoning_gym:gcd", 1),
    ):
        task = Task(name, rows_of(1), rows_of(1), [])
        assert (task.short_name, least_train_size(name)) == (short, size)


def test_field_names_do_not_clash_with_trls():
    trls = {field.name for config in (GRPOConfig, ModelConfig) for field in fields(config)}
    assert not trls & {field.name for field in fields(TaskConfig)}
    assert all("help" in field.metadata for field in fields(TaskConfig))
