"""What either of two processes does for test_ungraded: see `tests.trl.worker`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.trl import tiny
from troll.rewards.grading import Grader, Verdict
from troll.trl.conversations import Conversations
from troll.trl.ungraded import NothingJudgedError, UngradedFilter

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 6, "steps_per_generation": 2}


def stuck(text: str) -> bool:
    """Whether no sandbox takes the text."""
    return sum(map(ord, text)) % 3 == 0


def success(text: str) -> float:
    """What it is worth, if it can be judged."""
    return float(len(set(text)) % 2)


class Sometimes(Grader):
    """A third of the texts cannot be judged."""

    def grade(self, completions: Any, **columns: Any) -> list[Verdict]:
        return [Verdict(None if stuck(text) else success(text), text, "unscored: no process") for text in completions]


def form(completions: Any, **_: Any) -> list[float]:
    """Pays for something else, and for every text."""
    return [len(text) / 8 for text in completions]


def ended(accelerator: Any) -> str:
    """With what a run ends in which nothing can be judged; two of three times for lack of memory."""
    grader = Sometimes()
    unscored = UngradedFilter(accelerator, [grader])
    reasons = ["no process"] if accelerator.process_index == 0 else ["no memory"] * 2
    grader.latest = [Verdict(None, "program", f"unscored: {reason}") for reason in reasons]
    batch = {"completion_mask": torch.ones(2, 2), "num_items_in_batch": torch.tensor(8.0)}
    try:
        for _ in range(3):
            unscored.count_verdicts()
            unscored.observe(torch.full((4, 1), torch.nan))
            unscored.without(batch, Conversations(accelerator).of_rows)
    except NothingJudgedError as error:
        return str(error)
    return ""


def work(mode: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """A rollout and an evaluation in which some completions cannot be judged, and runs in which none can."""
    make = tiny.Maker(models, folder / "out")
    evaluation = {
        "eval_dataset": tiny.make_dataset(4),
        "do_eval": True,
        "eval_strategy": "no",
        "num_generations_eval": 4,
    }
    trainer = make(reward_funcs=[Sometimes(), form], **tiny.halved(SETTINGS), **evaluation)
    assert trainer.accelerator.num_processes == 2
    rollout = tiny.rolled_out(trainer)
    logs = {name: list(trainer._logs[name]) for name in ("completion", "advantages")}
    metrics = dict(trainer._metrics["train"])
    evaluated = trainer.evaluate()
    left_nothing = []
    for tokens in (trainer.accelerator.process_index, 0):  # of another process, and of none
        trainer.ungraded.count({"completion_mask": torch.tensor([tokens])})
        left_nothing.append(trainer.ungraded.left_nothing())
    return {
        "rollout": tiny.tensors(rollout),
        "metrics": metrics,
        "logs": logs,
        "evaluated": {name: value for name, value in evaluated.items() if isinstance(value, float)},
        "left_nothing": left_nothing,
        "ended": ended(trainer.accelerator),
        "answers": [verdict.answer for verdict in trainer.eval_metrics._verdicts],
    }
