from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from troll.evaluation.command import by_task, configuration
from troll.evaluation.errors import EvaluationError
from troll.tasks import TaskError

DEFAULTS: dict[str, Any] = {
    "model": "some/model",
    "task": ["gsm8k"],
    "dataset_path": [],
    "task_options": [],
    "eval_size": None,
    "samples": 1,
    "k": None,
    "temperature": None,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": None,
    "batch_size": None,
    "backend": "auto",
    "seed": 0,
    "dtype": "auto",
    "chat_template_kwargs": None,
    "model_revision": None,
    "trust_remote_code": False,
    "output_dir": None,
}


def typed(**changed: Any) -> Namespace:
    return Namespace(**{**DEFAULTS, **changed})


def test_one_task_takes_a_path_as_it_is() -> None:
    assert by_task("dataset_path", ["data=1/x"], ["gsm8k"]) == {"gsm8k": "data=1/x"}
    assert by_task("dataset_path", ["gsm8k=data"], ["gsm8k"]) == {"gsm8k": "data"}
    assert by_task("dataset_path", [], ["gsm8k", "math"]) == {}


def test_several_tasks_take_a_value_each() -> None:
    tasks = ["gsm8k", "reasoning_gym:chain_sum", "math"]
    values = ["math=a", 'reasoning_gym:chain_sum={"max_terms": 3}']
    assert by_task("x", values, tasks) == {"math": "a", "reasoning_gym:chain_sum": '{"max_terms": 3}'}
    with pytest.raises(EvaluationError, match=r"x data is of no task: write --x gsm8k=\.\.\. reasoning_gym"):
        by_task("x", ["data"], tasks)
    with pytest.raises(EvaluationError, match="given twice for math"):
        by_task("x", ["math=a", "math=b"], tasks)
    with pytest.raises(EvaluationError, match="is of no task"):
        by_task("x", ["a", "b"], ["math"])


def test_options_become_settings() -> None:
    config = configuration(
        typed(
            task=["gsm8k", "reasoning_gym:chain_sum"],
            dataset_path=["gsm8k=data"],
            task_options=['reasoning_gym:chain_sum={"max_terms": 3}'],
            eval_size=7,
            samples=4,
            k=[1, 2],
            chat_template_kwargs='{"enable_thinking": false}',
            output_dir=Path("out"),
        )
    )
    first, second = config.tasks
    assert (first.task, first.dataset_path, first.options, first.eval_size) == ("gsm8k", "data", {}, 7)
    assert (second.dataset_path, second.options, second.eval_size) == (None, {"max_terms": 3}, 7)
    assert (config.samples, config.resolved_ks, config.resolved_temperature) == (4, [1, 2], 1.0)
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.folder == Path("out")
    assert configuration(typed()).tasks[0].eval_size is None


def test_a_run_says_how_much_it_held_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: math\neval_size: 8\n")
    (tmp_path / "checkpoint-2").mkdir()
    run = str(tmp_path)
    assert configuration(typed(model=f"{run}/checkpoint-2", task=["./math"])).tasks[0].eval_size == 8
    sizes = [task.eval_size for task in configuration(typed(model=run, task=["math", "gsm8k"])).tasks]
    assert sizes == [8, None]
    assert configuration(typed(model=run, task=["math"], eval_size=9)).tasks[0].eval_size == 9
    (tmp_path / "config.yaml").write_text("[")
    with pytest.raises(EvaluationError, match=r"config\.yaml: not YAML"):
        configuration(typed(model=run))


def test_files_are_loaded_as_for_training() -> None:
    tasks = configuration(typed(task=["gsm8k", "own.py", "own.yaml"])).tasks
    assert [task.train_size for task in tasks] == [1, None, None]


@pytest.mark.parametrize("text", ["[1]", "{", "1"])
def test_variables_of_the_chat_template_are_an_object(text: str) -> None:
    with pytest.raises(EvaluationError, match="chat_template_kwargs must be a JSON object"):
        configuration(typed(chat_template_kwargs=text))


def test_mistakes_of_tasks() -> None:
    with pytest.raises(TaskError, match="eval_size must be at least 1"):
        configuration(typed(eval_size=0))
    with pytest.raises(TaskError, match="not valid JSON"):
        configuration(typed(task_options=["{"]))
