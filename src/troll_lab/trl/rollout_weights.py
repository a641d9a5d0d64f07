"""Rollouts of older weights, which simulate an asynchronous engine except for its speed and kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from troll.trl.seam import add_metrics, micro_batches_done
from troll_lab.trl.checkpoints import load_state, save_state
from troll_lab.trl.seam import generating_within

#: The file of a checkpoint that holds the weights that later rollouts are sampled with.
WEIGHTS_STATE = "rollout_weights.pt"


class RolloutWeights:
    """Samples rollouts with the trained weights of k rollouts ago.

    The first k + 1 rollouts use the initial weights. A rollout is made and trained on in one process, but is as old as
    one from a queue of k rollouts. With `anchor="old"`, only generation uses these weights, and the old policy is the
    network when the rollout is scored. With `anchor="rollout"`, scoring uses them too, so the old policy is exactly the
    policy that sampled the tokens.

    It keeps k + 1 copies of the trained weights in memory, and k in every checkpoint. Every method runs on every
    process.

    Raises:
        ValueError: With a rollout function, or where a process holds only a part of the weights.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._delay = trainer, trainer.args.rollout_delay
        if trainer.rollout_func is not None:
            raise ValueError(
                "rollout_delay is for transformers' generation: leave it out, or leave out the rollout function"
            )
        if trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise ValueError("rollout_delay needs whole weights on every process: use DDP, or leave it out")
        self.start()

    def start(self) -> None:
        """Begins a training."""
        #: The trained weights at the last rollouts, the oldest first, and the passes that were done before each.
        self._weights: deque[tuple[int, list[Tensor]]] = deque(maxlen=self._delay + 1)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """A context in which TRL samples one rollout with these weights; logs `sampling/rollouts_behind`, their age."""
        weights = [parameter.detach().clone() for parameter in self._trained()]
        self._weights.append((micro_batches_done(self._trainer), weights))
        whole = self._trainer.args.anchor == "rollout"
        with self._sampling() if whole else generating_within(self._trainer, self._sampling):
            yield
        add_metrics(self._trainer, {"sampling/rollouts_behind": len(self._weights) - 1})

    def passes_behind(self, *, anew: bool) -> int:
        """See `TrollTrainer.passes_behind`."""
        taken = [passes for passes, _ in self._weights]
        if anew:
            taken = [*taken, micro_batches_done(self._trainer)][-self._delay - 1 :]
        return taken[-1] - taken[0]

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        try:
            self._set(self._weights[0][1])
            yield
        finally:
            self._set(self._weights[-1][1])

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._trained(), weights, strict=True):
            parameter.copy_(weight)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._trainer.model.parameters() if parameter.requires_grad]

    def save(self, checkpoint: Path) -> None:
        """Writes `WEIGHTS_STATE` into a checkpoint's folder, atomically."""
        if self._trainer.args.should_save:
            kept, done = list(self._weights)[-self._delay :], micro_batches_done(self._trainer)
            state = {
                "delay": self._delay,
                "weights": [weights for _, weights in kept],
                "passes_since": [done - passes for passes, _ in kept],
            }
            save_state(state, checkpoint / WEIGHTS_STATE)

    def load(self, checkpoint: Path) -> None:
        """Reads the weights of `save`; raises an error if the checkpoint has none, or those of another delay."""
        state = load_state(checkpoint / WEIGHTS_STATE, f"a run with rollout_delay={self._delay}")
        if state["delay"] != self._delay:
            raise ValueError(
                f"{checkpoint} is of a run with rollout_delay={state['delay']}, and this one has {self._delay}: "
                "resume with the same value"
            )
        # A resumed training counts its passes from 0.
        self._weights.extend(
            (-since, weights) for since, weights in zip(state["passes_since"], state["weights"], strict=True)
        )
