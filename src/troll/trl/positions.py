"""Values of the scored tokens, and the (B, T) positions that they belong to."""

from __future__ import annotations

from torch import Tensor


def scatter(values: Tensor, mask: Tensor, fill: float = 0) -> Tensor:
    """Puts (N, ...) values where a mask is true, and `fill` elsewhere; differentiable even if it is true nowhere."""
    empty = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return empty.masked_scatter(mask.view(*mask.shape, *(1,) * (values.dim() - 1)), values)
