"""What either of two processes does for test_resampling: see `tests.trl.worker`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from tests.trl import tiny
from tests.trl.resuming import interrupted

#: Three groups, of which the middle one lies on both of two processes.
SETTINGS: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 6,
    "steps_per_generation": 2,
    "resampling_rounds": 4,
    "kl_bound": 0.01,
}


def dataset(size: int = 16) -> Dataset:
    """Problems of which every second is solved always."""
    return tiny.make_dataset(size).add_column("solved", [i % 2 == 0 for i in range(size)])


def reward(completion_ids: Sequence[list[int]], solved: Sequence[bool], log_extra: Any, **_: Any) -> list[float]:
    """1 where the problem is solved always; else `tiny.reward`, which differs. Logs the completion's length."""
    log_extra("length", [len(ids) for ids in completion_ids])
    return [1.0 if always else each for always, each in zip(solved, tiny.reward(list(completion_ids)), strict=True)]


def work(mode: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    """A rollout with its metrics, and a run that is resumed."""
    make = tiny.Maker(models, folder / "out")
    trainer = make(reward_funcs=reward, train_dataset=dataset(), **tiny.halved(SETTINGS))
    assert trainer.accelerator.num_processes == 2
    rollout = tiny.rolled_out(trainer)
    logs = {name: list(trainer._logs[name]) for name in ("prompt", "advantages")}
    logs |= {"length": list(trainer._logs["extra"]["length"])}
    metrics = dict(trainer._metrics["train"])
    both = {"resampling_rounds": 4, "rollout_delay": 1, "num_generations": 2}
    resumed = interrupted(make, folder / "run", reward_funcs=reward, train_dataset=dataset(), **both)
    return {"rollout": tiny.tensors(rollout), "metrics": metrics, "logs": logs, "interrupted": resumed}
