"""What either of two processes does for test_token_rewards: see `tests.trl.worker`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.trl import tiny


class Odd:
    """1 for every completion of at least two tokens, else 0; of the former, odd tokens are worth nothing."""

    __name__ = "odd"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids) > 1) for ids in completion_ids]

    def of_tokens(self, completion_ids: list[list[int]], rewards: list[float], **columns: Any) -> Any:
        self.asked.append({"completion_ids": completion_ids, "rewards": rewards, **columns})
        return [said(ids) for ids in completion_ids]


def said(ids: list[int]) -> list[float] | None:
    """What it says of a completion."""
    return [float(token % 2 == 0) for token in ids] if len(ids) > 1 else None


def work(mode: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """A rollout of three groups, of which the middle one lies on both processes, and the share κ after two of them."""
    make = tiny.Maker(models, folder / "out")
    settings: dict[str, Any] = {"per_device_train_batch_size": 3, "ddp_backend": "gloo", "resampling_rounds": 1}
    more: dict[str, Any] = {
        "resampling_right_share": 1.0,
        "advantage_estimator": "rloo_tokens",
        "max_completion_length": 32,
    }
    trainer = make(reward_funcs=Odd(), **settings, **more)
    assert trainer.accelerator.num_processes == 2
    rollout = tiny.rolled_out(trainer)
    metrics = dict(trainer._metrics["train"])
    tiny.rolled_out(trainer, seed=5)
    return {"rollout": tiny.tensors(rollout), "metrics": metrics, "right_share": trainer.resampling._right_share}
