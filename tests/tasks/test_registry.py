from dataclasses import fields

import pytest
from datasets import Dataset
from trl import GRPOConfig, ModelConfig, TrlParser

from troll.tasks import Task, TaskConfig, TaskError, load_task, register_task
from troll.tasks import registry as registry_module


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


def test_registering_a_prefix_twice_is_an_error(echo_task):
    with pytest.raises(ValueError, match="'echo' is registered already"):
        register_task("echo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", r"unknown task 'gsm9k'; known tasks: free_text, geometry3k, gsm8k, prompts\[:<hub data set>\], reas"),
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
        ({"task_options": "{max_terms: 3}"}, "not valid JSON"),
        ({"task_options": "[3]"}, "must be a JSON object"),
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"eval_size": -1}, "eval_size must be at least 1, got -1"),
    ],
)
def test_config_refuses(arguments, message):
    with pytest.raises(TaskError, match=message) as error:
        TaskConfig(**arguments)
    assert "\n" not in str(error.value)


def test_config_parses_from_the_command_line_beside_trls():
    parser = TrlParser([TaskConfig, ModelConfig])  # type: ignore[list-item]
    config, _ = parser.parse_args_and_config(
        ["--task", "reasoning_gym:gcd", "--task_options", '{"max_terms": 3}', "--train_size", "7"]
    )
    assert config == TaskConfig(task="reasoning_gym:gcd", task_options={"max_terms": 3}, train_size=7)
    assert config.options == {"max_terms": 3}
    assert TaskConfig().options == {}


def test_config_parses_from_yaml(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: gsm8k\ndataset_path: data\ntask_options:\n  max_terms: 3\n")
    parser = TrlParser([TaskConfig])  # type: ignore[list-item]
    (config,) = parser.parse_args_and_config(["--config", str(recipe)])
    assert config == TaskConfig(task="gsm8k", dataset_path="data", task_options={"max_terms": 3})


def test_field_names_do_not_clash_with_trls():
    trls = {field.name for config in (GRPOConfig, ModelConfig) for field in fields(config)}
    assert not trls & {field.name for field in fields(TaskConfig)}
    assert all("help" in field.metadata for field in fields(TaskConfig))
