import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console

from tests.troll_lab.runs.conftest import tiny_model  # noqa: F401  a fixture
from troll.grading import Grader, Verdict
from troll_lab.evaluation.config import EvaluationConfig
from troll_lab.tasks import Task, TaskConfig, registry


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=120)


def small_evaluation(model: Path, folder: Path, /, **changed: Any) -> EvaluationConfig:
    """Settings of an evaluation of seconds, of which any can be changed."""
    chain_sum = TaskConfig(task="reasoning_gym:chain_sum", train_size=1, eval_size=5)
    defaults: dict[str, Any] = {"samples": 3, "max_new_tokens": 6, "batch_size": 4, "output_dir": folder}
    return EvaluationConfig(**(defaults | {"model": str(model), "tasks": [chain_sum]} | changed))


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> Callable[..., EvaluationConfig]:  # noqa: F811
    """`small_evaluation` into `tmp_path / "out"`."""
    return functools.partial(small_evaluation, tiny_model, tmp_path / "out")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


class LastCharacter(Grader):
    """Judges by the last character, and takes letters in either case for one answer."""

    votes = True

    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        return [
            Verdict(float(text[-1:].lower() == letter), text[-1:] or None, "correct" if text else "no answer")
            for text, letter in zip(completions, columns["letter"], strict=True)
        ]

    def same_answer(self, first: str, second: str) -> bool:
        return first.lower() == second.lower()


def register(monkeypatch: pytest.MonkeyPatch, name: str, rewards: list[Any], **columns: list[Any]) -> TaskConfig:
    """A task with these rows, in place of one of that name."""
    rows = Dataset.from_dict(columns)
    entry = registry.Registration(name, lambda config, argument: Task(name, rows, rows, rewards), trains=True, about="")
    monkeypatch.setitem(registry._LOADERS, name, entry)
    return TaskConfig(name)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> TaskConfig:
    """A task whose answers can be compared."""
    prompts = [f"letter {index}:" for index in range(4)]
    return register(monkeypatch, "letters", [LastCharacter()], prompt=prompts, letter=list("abcd"))
