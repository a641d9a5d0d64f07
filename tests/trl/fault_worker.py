"""Runs of test_faults, each in processes of its own: `accelerate launch -m tests.trl.fault_worker ...`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from tests.dying import dying
from tests.trl import tiny
from troll.trl import TrollTrainer

#: Three rollouts of two updates, and as many checkpoints; an ε and a critic that move with every update.
SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "kl_bound": 0.01,
    "kl_bound_schedule": "hold_kl",
    "kl_bound_schedule_kwargs": {"target": 1.0, "rate": 0.1, "smoothing": 0.5},
    "advantage_estimator": "gae",
    "critic_kwargs": {"learning_rate": 1e-2},
}


class KeepState(TrainerCallback):
    """Parameters, the critic's and ε before the first update and after each, by step."""

    trainer: Any

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator, models = self.trainer.accelerator, {"policy": self.trainer.model_wrapped}
        if self.trainer.advantages.critic is not None:
            models["critic"] = self.trainer.advantages.critic.model
        self.states[state.global_step] = {
            f"{kind} {name}": value.clone()
            for kind, model in models.items()
            for name, value in accelerator.unwrap_model(model).state_dict().items()
        } | {"bound": torch.tensor(self.trainer.callback.kl_bound.value)}


def train(model_path: Path, output_dir: Path, place: str, resume: bool | str | None, **settings: Any) -> dict[str, Any]:
    """A run that dies at a place, or leaves its states by step and what was logged."""
    torch.set_num_threads(1)
    callbacks, context = dying(place)
    keep, handler = KeepState(), mock.Mock(level=logging.NOTSET)
    logger = logging.getLogger("troll.trl.checkpoints")
    logger.addHandler(handler)
    make = tiny.Maker(lambda _: model_path, output_dir)
    keep.trainer = make(TrollTrainer, callbacks=callbacks, **{**SETTINGS, **settings})
    keep.trainer.add_callback(keep)  # after the trainer's own, so that it sees what that restores and adapts
    with context:
        keep.trainer.train(resume_from_checkpoint=resume)
    logger.removeHandler(handler)
    return {"states": keep.states, "lines": [call.args[0].getMessage() for call in handler.handle.call_args_list]}


def run(model_path: Path, output_dir: Path, place: str, resume: bool | str | None, result: Path) -> None:
    """`train`, with its result in a file."""
    torch.save(train(model_path, output_dir, place, resume), result)


def main() -> None:
    """A run without a break and one in which the second process dies; or, without a place, that one resumed."""
    model, folder, *place = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    settings = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    if place:
        whole = train(Path(model), Path(folder, "whole"), "", None, **settings)
        torch.save(whole, Path(folder, f"whole-{rank}.pt"))
        train(Path(model), Path(folder, "out"), place[0] if rank == 1 else "", None, **settings)
    resumed = train(Path(model), Path(folder, "out"), "", True, **settings)
    torch.save(resumed, Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
