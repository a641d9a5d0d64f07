"""Values of the scored tokens, and the (B, T) positions that they belong to."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from troll.trust_region.policy.packed import PackedPolicy


def scatter(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Puts (N, ...) values where a mask is true, and `fill` elsewhere; differentiable even if it is true nowhere."""
    empty = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return empty.masked_scatter(mask.view(*mask.shape, *(1,) * (values.dim() - 1)), values)


def spread(policy: PackedPolicy, mask: Tensor) -> PackedPolicy:
    """Puts the policies of N tokens where a mask is true; other positions have no slot.

    Args:
        policy: (N,).
        mask: (B, T) bool, true N times.
    """
    per_position = {name: scatter(getattr(policy, name), mask) for name in ("counts", "tail_log_prob", "slot")}
    return dataclasses.replace(policy, **per_position)  # type: ignore[arg-type]
