"""One process of test_unscored: ``accelerate launch -m tests.trl.unscored_worker MODEL FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.trl import tiny
from troll.rewards.grading import Grader, Verdict

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
        return [Verdict(None if stuck(text) else success(text), text, "") for text in completions]


def form(completions: Any, **_: Any) -> list[float]:
    """Pays for something else, and for every text."""
    return [len(text) / 8 for text in completions]


def main() -> None:
    torch.set_num_threads(1)
    model, folder = map(Path, sys.argv[1:])
    make = tiny.Maker(lambda architecture: model, folder / "out")
    halves = {"per_device_train_batch_size": SETTINGS["per_device_train_batch_size"] // 2, "ddp_backend": "gloo"}
    evaluation = {
        "eval_dataset": tiny.make_dataset(4),
        "do_eval": True,
        "eval_strategy": "no",
        "num_generations_eval": 4,
    }
    trainer = make(reward_funcs=[Sometimes(), form], **SETTINGS | halves | evaluation)
    assert trainer.accelerator.num_processes == 2
    rollout = tiny.rolled_out(trainer)
    logs = {name: list(trainer._logs[name]) for name in ("completion", "advantages")}
    metrics = dict(trainer._metrics["train"])
    evaluated = trainer.evaluate()
    kept = {name: value for name, value in rollout.items() if isinstance(value, torch.Tensor)}
    found = {
        "rollout": kept,
        "metrics": metrics,
        "logs": logs,
        "evaluated": {name: value for name, value in evaluated.items() if isinstance(value, float)},
        "answers": [verdict.answer for verdict in trainer.held_out._verdicts],
    }
    torch.save(found, folder / f"{trainer.accelerator.process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
