"""α, the weight of the pull: fixed, or adapted after each rollout."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from troll.files import json_text, read_json, write_atomically
from troll.trust_region.weight import adapted, limited

logger = logging.getLogger(__name__)

#: The file of an actor's checkpoint that holds α, if it adapts.
WEIGHT_STATE = "regression_weight.json"


class RegressionWeight:
    """α during training, the same on every process; it adapts by PPO's rule (arXiv 1707.06347, section 4).

    The divergence is that of the pull, measured in the last update of a rollout: the mean over the tokens of all
    processes.

    Args:
        initial: α at the start.
        target: The mean divergence to reach, in nats; None keeps α.

    Attributes:
        value: The current α.
        adapts: Whether there is a target.
    """

    def __init__(self, initial: float, target: float | None) -> None:
        self.value, self.adapts = initial, target is not None
        self._initial, self._target = initial, target
        self._warned = False

    def adapt(self, kl: float) -> float | None:
        """Adapts α, within its limits, to the mean divergence of a rollout's last update.

        Args:
            kl: The divergence, in nats; not finite if no token counts. Every process calls this. The first one's number
                decides, since rounding may differ between processes, and they must share one α.

        Returns:
            The first process's divergence; None if it is not finite.
        """
        assert self._target is not None
        kl = _from_first(kl)
        if not math.isfinite(kl):
            return None
        wanted = adapted(self.value, kl, self._target)
        self.value = limited(wanted, self._initial)
        if self.value != wanted and not self._warned and torch.distributed.get_rank() == 0:
            self._warned = True
            logger.warning(
                "regression_weight stays at %g, the limit of its range, though the mean KL is %.2g and "
                "regression_target %g: choose another regression_target, optim.lr or ppo_mini_batch_size",
                self.value,
                kl,
                self._target,
            )
        return kl

    def save(self, checkpoint: Path) -> None:
        """Writes α into a checkpoint, if it adapts; every process may call it."""
        if self.adapts and torch.distributed.get_rank() == 0:
            write_atomically(checkpoint / WEIGHT_STATE, json_text({"weight": self.value}))

    def load(self, checkpoint: Path) -> None:
        """Restores the α of a checkpoint, if it adapts; every process must call it, but only the first one reads."""
        if not self.adapts:
            return
        value = self._initial
        if torch.distributed.get_rank() == 0:
            if (checkpoint / WEIGHT_STATE).is_file():
                value = read_json(checkpoint / WEIGHT_STATE)["weight"]
            else:
                logger.warning("%s has no %s: regression_weight starts anew", checkpoint, WEIGHT_STATE)
        self.value = _from_first(value)


def _from_first(number: float) -> float:
    """The first process's number, on every process."""
    found = [number]
    torch.distributed.broadcast_object_list(found)
    return found[0]
