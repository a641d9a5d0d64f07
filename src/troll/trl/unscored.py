"""Completions that a grader could not judge: they are left out of a rollout, whatever other rewards say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from troll.rewards.grading import leaves_unscored
from troll.trl.seam import loss_mask


class Unscored:
    """Knows the completions of a rollout that could not be judged.

    To TRL, None from a reward function means that the function has nothing to say, and the other functions' rewards
    count: a completion that no sandbox could test would be paid for its format alone. None from a `Grader` means that
    nobody knows what the completion is worth. Such a row has no reward at all, so that no baseline counts it, and no
    token in the loss.

    Args:
        accelerator: The trainer's.
        reward_funcs: The trainer's.
    """

    def __init__(self, accelerator: Accelerator, reward_funcs: Sequence[Any]) -> None:
        self._accelerator = accelerator
        self._columns = [place for place, reward in enumerate(reward_funcs) if leaves_unscored(reward)]
        self._rows = torch.empty(0, dtype=torch.bool)

    def rows(self, rewards: Tensor) -> Tensor:
        """Which rows of (N, F) rewards could not be judged, (N,) bool; NaN stands for None."""
        return rewards[:, self._columns].isnan().any(1)

    def excluded(self, rewards: Tensor) -> Tensor:
        """The (N, F) rewards, with nothing but NaN in the rows that could not be judged."""
        return rewards.masked_fill(self.rows(rewards).unsqueeze(1), torch.nan)

    def metrics(self, rewards: Tensor) -> dict[str, float]:
        """``rewards/unscored``, the share of rows that could not be judged; nothing where no function is a grader."""
        return {"rewards/unscored": float(self.rows(rewards).float().mean())} if self._columns else {}

    def observe(self, rewards: Tensor) -> None:
        """Keeps which rows of a rollout of all processes could not be judged."""
        self._rows = self.rows(rewards)

    def without(self, rolled_out: dict[str, Any]) -> dict[str, Any]:
        """This process's part of the rollout, in which these rows have no token in the loss."""
        if not self._rows.any():
            return rolled_out
        mask: Tensor = rolled_out["completion_mask"]
        first = self._accelerator.process_index * len(mask)
        scored = ~self._rows[first : first + len(mask)].unsqueeze(1)
        rolled_out = rolled_out | {"tool_mask": rolled_out.get("tool_mask", torch.ones_like(mask)) * scored}
        tokens = self._accelerator.reduce(loss_mask(rolled_out).sum(), reduction="sum")
        return rolled_out | {"num_items_in_batch": tokens.to(rolled_out["num_items_in_batch"])}
