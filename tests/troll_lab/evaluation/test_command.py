from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from troll_lab import cli
from troll_lab.evaluation.command import as_in_training, by_task, configuration, other_prompts, training_rows
from troll_lab.evaluation.config import EvaluationConfig, EvaluationError
from troll_lab.evaluation.training_task import TrainingTask
from troll_lab.tasks import TaskConfig, TaskError

PARSER = ArgumentParser()
cli._add_eval(PARSER)


def configured(trained: TrainingTask | None = None, **changed: Any) -> EvaluationConfig:
    typed = vars(PARSER.parse_args(["some/model", "--task", "gsm8k"])) | changed
    return configuration(Namespace(**typed), trained)


@pytest.mark.parametrize(
    ("values", "tasks", "found"),
    [
        (["data=1/x"], ["gsm8k"], {"gsm8k": "data=1/x"}),
        (["gsm8k=data"], ["gsm8k"], {"gsm8k": "data"}),
        ([], ["gsm8k", "math"], {}),
        (["math=a", "r:x={}"], ["gsm8k", "r:x", "math"], {"math": "a", "r:x": "{}"}),
    ],
)
def test_by_task_gives_each_task_its_value(values: list[str], tasks: list[str], found: dict[str, str]) -> None:
    assert by_task("dataset_path", values, tasks) == found


@pytest.mark.parametrize(
    ("values", "tasks", "message"),
    [
        (["data"], ["gsm8k", "math"], r"x data does not belong to a task: write --x gsm8k=\.\.\. math=\.\.\."),
        (["math=a", "math=b"], ["gsm8k", "math"], "given twice for math"),
        (["a", "b"], ["math"], "does not belong to a task"),
    ],
)
def test_by_task_refuses(values: list[str], tasks: list[str], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        by_task("x", values, tasks)


TRAINED = TrainingTask(
    task="math",
    dataset_path="/data/math",
    task_options={"answer_format": "tag", "system_prompt": "Think."},
    eval_size=8,
    chat_template_kwargs={"enable_thinking": False},
)


def test_options_become_settings() -> None:
    config = configured(
        task=["gsm8k", "reasoning_gym:chain_sum", "own.py", "own.yaml"],
        dataset_path=["gsm8k=data"],
        task_options=['reasoning_gym:chain_sum={"max_terms": 3}'],
        eval_size=7,
        samples=4,
        k=[1, 2],
        chat_template_kwargs='{"enable_thinking": false}',
        output_dir=Path("out"),
    )
    assert config.tasks == [
        TaskConfig("gsm8k", "data", {}, train_size=1, eval_size=7),
        TaskConfig("reasoning_gym:chain_sum", task_options={"max_terms": 3}, train_size=1, eval_size=7),
        TaskConfig("own.py", task_options={}, eval_size=7),  # files are loaded as for training
        TaskConfig("own.yaml", task_options={}, eval_size=7),
    ]
    assert (config.samples, config.resolved_ks, config.resolved_temperature) == (4, [1, 2], 1.0)
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.folder == Path("out")
    assert configured().tasks[0].eval_size is None


def test_model_brings_the_settings_of_its_training() -> None:
    for names in (None, ["math"]):
        config = configured(TRAINED, task=names)
        (task,) = config.tasks
        assert (task.task, task.dataset_path, task.eval_size) == ("math", "/data/math", 8)
        assert task.options == TRAINED.task_options
        assert config.chat_template_kwargs == TRAINED.chat_template_kwargs
        assert other_prompts(config, TRAINED) == []
        assert as_in_training(config, TRAINED) == (
            'as in training: task math, task_options {"answer_format": "tag", "system_prompt": "Think."}, '
            'dataset_path /data/math, eval_size 8, chat_template_kwargs {"enable_thinking": false}'
        )


def test_options_override_single_settings_of_the_training() -> None:
    config = configured(
        TRAINED,
        task=None,
        task_options=['{"answer_format": "boxed", "prompt": "{question}"}'],
        dataset_path=["elsewhere"],
        eval_size=9,
        chat_template_kwargs='{"enable_thinking": true}',
    )
    (task,) = config.tasks
    assert (task.dataset_path, task.eval_size) == ("elsewhere", 9)
    assert task.options == {"answer_format": "boxed", "system_prompt": "Think.", "prompt": "{question}"}
    assert as_in_training(config, TRAINED) == 'as in training: task math, task_options {"system_prompt": "Think."}'
    assert other_prompts(config, TRAINED) == [
        'math is not prompted as the model was in training: task_options.answer_format was "tag" and is "boxed"; '
        'task_options.prompt was not set and is "{question}"; '
        "chat_template_kwargs.enable_thinking was false and is true"
    ]


def test_larger_size_than_in_training_finds_training_rows(tmp_path: Path) -> None:
    """The last rows of one file are held out; a folder has a file of held-out rows."""
    file = tmp_path / "rows.jsonl"
    file.touch()
    for place, warned in ((file, True), (tmp_path, False)):
        trained = replace(TRAINED, dataset_path=str(place))
        for size in (8, 9):
            lines = training_rows(configured(trained, task=None, eval_size=size), trained)
            assert [f"held out 8 rows of {file}, and eval_size is 9" in line for line in lines] == [True] * (
                warned and size > 8
            )
    assert training_rows(configured(trained, task=None, dataset_path=[str(file)], eval_size=9), trained) == []


def test_null_removes_a_setting_of_the_training() -> None:
    nothing = {"task_options": ['{"system_prompt": null}'], "chat_template_kwargs": '{"enable_thinking": null}'}
    config = configured(TRAINED, task=None, **nothing)
    assert config.tasks[0].options == {"answer_format": "tag"}
    assert config.chat_template_kwargs == {}
    assert other_prompts(config, TRAINED) == [
        'math is not prompted as the model was in training: task_options.system_prompt was "Think." and is not set; '
        "chat_template_kwargs.enable_thinking was false and is not set"
    ]


def test_other_tasks_get_only_chat_template_variables() -> None:
    config = configured(TRAINED, task=["gsm8k", "reasoning_gym:chain_sum"])
    assert [(task.dataset_path, task.options, task.eval_size) for task in config.tasks] == [(None, {}, None)] * 2
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert as_in_training(config, TRAINED) == 'as in training: chat_template_kwargs {"enable_thinking": false}'
    first, second = other_prompts(config, TRAINED)
    assert first == (
        'gsm8k is not prompted as the model was in training: task_options.answer_format was "tag" and is not set; '
        'task_options.system_prompt was "Think." and is not set'
    )
    assert second.startswith("reasoning_gym:chain_sum is not prompted")


def test_prompt_of_one_task_is_not_expected_of_another() -> None:
    trained = TrainingTask("reasoning_gym:chain_sum", None, {"prompt": "{expression} =", "max_terms": 3}, 8, {})
    config = configured(trained, task=["gsm8k"])
    assert other_prompts(config, trained) == []
    assert as_in_training(config, trained) is None


def test_task_of_ones_own_is_known_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = TrainingTask.of(TaskConfig("own.py:8", dataset_path="rows.jsonl", eval_size=4), None)
    for names in (None, ["./own.py:8"], [f"{tmp_path}/own.py:8"]):
        (task,) = configured(trained, task=names).tasks
        assert (task.task, task.dataset_path, task.eval_size) == ((names or ["own.py:8"])[0], "rows.jsonl", 4)
    assert configured(trained, task=["own.py:9"]).tasks[0].dataset_path is None


@pytest.mark.parametrize(
    ("changed", "trained", "message"),
    [
        ({"task": None, "task_options": ["{}"]}, None, "there is no folder .*; for a model on the hub, .* --task"),
        ({"task": None}, TrainingTask(None, None, {}, None, {}), "on a task of another machine: name a task"),
        ({"chat_template_kwargs": "[1]"}, None, "chat_template_kwargs must be a JSON object"),
        ({"chat_template_kwargs": "{"}, None, "chat_template_kwargs is not valid JSON"),
        ({"task_options": ["{"]}, None, "task_options is not valid JSON"),
    ],
)
def test_configuration_refuses(changed: dict[str, Any], trained: TrainingTask | None, message: str) -> None:
    with pytest.raises((EvaluationError, TaskError), match=message):
        configured(trained, **changed)
