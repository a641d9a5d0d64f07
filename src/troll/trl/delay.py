"""Rollouts of an older policy, as an asynchronous trainer's are, without its clock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from troll.trl import seam

#: The file of a checkpoint that holds the weights that later rollouts are sampled with.
DELAY_STATE = "rollout_delay.pt"


class RolloutDelay:
    """Samples every rollout with the trained weights of k rollouts ago; the first k + 1 with those of the start.

    A rollout is then made and trained on in one place, and still as old as one that waits in a queue of k. With
    ``anchor="old"``, only generation sees the older weights, and the old policy is the network when the rollout is
    scored. With ``anchor="rollout"``, scoring sees them too, so the old policy is exactly what sampled the tokens.

    It keeps k + 1 copies of the trained weights in memory, and k in every checkpoint. Every method runs on every
    process.

    Args:
        trainer: The `TrollTrainer`.

    Raises:
        ValueError: With a rollout function, or where a process holds only a part of the weights.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._delay = trainer, trainer.args.rollout_delay
        if trainer.rollout_func is not None:
            raise ValueError("rollout_delay cannot be used with a rollout function: set rollout_delay to 0")
        if trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise ValueError("rollout_delay needs whole weights on every process: use DDP, or set rollout_delay to 0")
        self.start()

    def start(self) -> None:
        """Begins a training."""
        #: The trained weights at the last rollouts, the oldest first.
        self._weights: deque[list[Tensor]] = deque(maxlen=self._delay + 1)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Has TRL sample one rollout with older weights; logs ``sampling/rollouts_behind``, by how many rollouts."""
        self._weights.append([parameter.detach().clone() for parameter in self._trained()])
        whole = self._trainer.args.anchor == "rollout"
        with self._older() if whole else seam.generating_within(self._trainer, self._older):
            yield
        seam.add_metrics(self._trainer, {"sampling/rollouts_behind": len(self._weights) - 1})

    @contextmanager
    def _older(self) -> Iterator[None]:
        self._set(self._weights[0])
        try:
            yield
        finally:
            self._set(self._weights[-1])

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._trained(), weights, strict=True):
            parameter.copy_(weight)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._trainer.model.parameters() if parameter.requires_grad]

    def save(self, checkpoint: Path) -> None:
        """Writes `DELAY_STATE`, which replaces another as a whole."""
        if self._trainer.args.should_save:
            part = checkpoint / f"{DELAY_STATE}.part"
            torch.save({"delay": self._delay, "weights": list(self._weights)[-self._delay :]}, part)
            os.replace(part, checkpoint / DELAY_STATE)

    def load(self, checkpoint: Path) -> None:
        """Goes on where `save` was.

        Raises:
            FileNotFoundError: If the checkpoint has no `DELAY_STATE`.
            ValueError: If it is of a run with another delay.
        """
        path = checkpoint / DELAY_STATE
        if not path.is_file():
            raise FileNotFoundError(
                f"{checkpoint} has no {DELAY_STATE}: it is no checkpoint of a run with rollout_delay={self._delay}, or "
                "save_only_model was set"
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["delay"] != self._delay:
            raise ValueError(
                f"{checkpoint} is of a run with rollout_delay={state['delay']}, and this one has {self._delay}: "
                "resume with the same"
            )
        self._weights.extend(state["weights"])
