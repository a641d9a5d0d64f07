"""What is done with a tile, some tokens' logits for some entries of the vocabulary: select, fold, or make a gradient.

`fold_triton` has the same functions for a GPU; `kernels.use_triton` chooses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from troll.trust_region.policy.top import top_ids
from troll.trust_region.policy.values import as_float

#: Where something as large as its operand has to be allocated, so many tokens go at once: memory of that size is kept
#: for the next time, while a whole tile's goes back to the system and returns page by page.
ROWS = 64

#: In `ascending`, where a slot is unused: larger than any token id.
NO_TOKEN = 2**31 - 1


class Transform(NamedTuple):
    """From what a source holds to logits, ``softcap · tanh(scale · x / softcap) / temperature``."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits in float32 (float64 for float64); may reuse the memory."""
        z = as_float(raw)
        if self.scale != 1.0:
            z = z.mul_(self.scale)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """The derivative of the logits with respect to what the source holds, at logits z."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1 - (z * (self.temperature / self.softcap)).square_()).mul_(factor)


class Tile(NamedTuple):
    """The logits of n tokens for W entries of the vocabulary."""

    values: Tensor
    """For the torch functions: logits, (n, W), in float32 or float64, whose memory may be used up.

    For the Triton functions: what the source holds, in its own dtype, to be transformed; (n, W) with contiguous
    columns, or, with `offsets`, any tensor. Only a gradient may be written to it.
    """
    first: int
    """The vocabulary entry of the first column."""
    width: int
    """W."""
    transform: Transform
    offsets: Tensor | None = None
    """(n,) int64: where rows begin in the memory of `values`, in elements; multiples of its strides.

    None for (n, W) values."""


class Support(NamedTuple):
    """The tokens that are asked for, of n tokens at most K each."""

    ids: Tensor
    """(n, K) int64, different in a row; −1 in unused slots."""
    ascending: Tensor
    """(n, K) int64: the same in ascending order; `NO_TOKEN` for the unused slots, which come last."""

    @classmethod
    def of(cls, ids: Tensor) -> Support:
        """With the order that the kernels take."""
        return cls(ids, ids.masked_fill(ids < 0, NO_TOKEN).sort(-1).values)

    def rows(self, rows: slice) -> Support:
        """Some tokens', sharing memory."""
        return Support(self.ids[rows], self.ascending[rows])


class Outside(NamedTuple):
    """Running sums over the logits outside a support, relative to their running maximum m. Each (N,).

    Never a difference of two sums: what is left out is left out before anything is added.
    """

    maximum: Tensor
    exp_sum: Tensor
    """``Σ e^{z − m}``."""
    weighted_sum: Tensor | None = None
    """``Σ e^{z − m} (z − m)``, for the entropy; all its terms have one sign."""

    @classmethod
    def empty(cls, like: Tensor, rows: int, entropy: bool) -> Outside:
        """Before the first tile."""
        zeros = like.new_zeros(rows)
        return cls(torch.full_like(zeros, -torch.inf), zeros, zeros.clone() if entropy else None)

    def rows(self, rows: slice) -> Outside:
        """Some tokens' sums, sharing memory."""
        return Outside(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]

    @property
    def log_sum(self) -> Tensor:
        """``log Σ e^z``, (N,); −inf where nothing is outside."""
        return self.maximum + self.exp_sum.log()

    @property
    def entropy(self) -> Tensor | None:
        """Of what is outside, by itself, (N,), in nats; 0 where nothing is. None without its sum."""
        if self.weighted_sum is None:
            return None
        return (self.exp_sum.log() - self.weighted_sum / self.exp_sum).masked_fill(self.exp_sum == 0, 0)


class SupportGradient(NamedTuple):
    """What the gradient with respect to the logits takes per token.

    Outside the support it is ``w_v (a − h (log w_v + H))`` with ``w_v = e^{z_v − log_outside}``; on it, `on_support`.
    """

    log_outside: Tensor
    """(N,), the log-sum-exp over the logits outside the support; 0 instead of −inf, NaN in a row without a gradient."""
    outside: Tensor
    """a = ∂L/∂(log_outside), (N,)."""
    on_support: Tensor
    """(N, K), the gradient with respect to what the source holds, written over the rest."""
    tail_entropy: Tensor | None
    """H, the entropy of the tokens outside among themselves, (N,); None where no gradient arrives through it."""
    tail_entropy_gradient: Tensor | None
    """h = ∂L/∂H, (N,)."""

    def rows(self, rows: slice) -> SupportGradient:
        """Some tokens', sharing memory."""
        return SupportGradient(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def select(tile: Tile, sampled: Tensor, k: int) -> Support:
    """The k largest logits of a tile, and the sampled tokens.

    Args:
        tile: (n, W); it is left as it is.
        sampled: The sampled tokens, (n,), anywhere in the vocabulary.
        k: At most W.

    Returns:
        Of k + 1 slots: the k largest, ties by the smaller id, in ascending order of their ids; and the sampled token in
        the last one, which is unused where that is among the others, or not in this tile.
    """
    ids = tile.first + top_ids(tile.values, k).sort(-1).values
    sampled = sampled.unsqueeze(-1)
    elsewhere = (sampled < tile.first) | (sampled >= tile.first + tile.width)
    known = elsewhere | (ids == sampled).any(-1, keepdim=True)
    return Support.of(torch.cat([ids, sampled.masked_fill(known, -1)], -1))


def fold_support(tile: Tile, support: Support, logits: Tensor, outside: Outside) -> None:
    """Reads a support's logits from a tile and adds all others to the running sums, in place.

    Args:
        tile: (n, W).
        support: Of n tokens with K slots.
        logits: (n, K), where the logits of the tokens of this tile are written.
        outside: Of n tokens.
    """
    z = tile.values
    at, slot, column = _entries(support, tile)
    logits[at, slot] = z[at, column]
    z[at, column] = -torch.inf

    maximum = torch.maximum(outside.maximum, z.amax(-1))
    center = maximum.masked_fill(maximum == -torch.inf, 0)
    rescale = torch.exp(outside.maximum - center)
    z.sub_(center.unsqueeze(-1))
    if outside.weighted_sum is None:
        exp_sum = z.exp_().sum(-1)
    else:
        exp_sum, weighted_sum = map(torch.cat, zip(*map(_entropy_sums, z.split(ROWS)), strict=True))
        moved = torch.where(rescale > 0, outside.maximum - center, 0)
        outside.weighted_sum.add_(outside.exp_sum * moved).mul_(rescale).add_(weighted_sum)
    outside.exp_sum.mul_(rescale).add_(exp_sum)
    outside.maximum.copy_(maximum)


def _entropy_sums(z: Tensor) -> tuple[Tensor, Tensor]:
    z.clamp_(min=_log_of_zero(z.dtype))  # −inf · 0 would be NaN
    exp = z.exp()
    with torch.autocast(z.device.type, enabled=False):  # it would compute in half precision
        return exp.sum(-1), torch.bmm(exp.unsqueeze(1), z.unsqueeze(2)).flatten()


def gradient(tile: Tile, support: Support, of: SupportGradient) -> Tensor:
    """The gradient with respect to what the source holds, (n, W), in the tile's memory; 0 in rows without one.

    Args:
        tile: (n, W).
        support: Of n tokens with K slots.
        of: Of n tokens.
    """
    z = tile.values
    slope = tile.transform.slope(z)
    log_w = z.sub_(of.log_outside.unsqueeze(-1))
    if of.tail_entropy is None or of.tail_entropy_gradient is None:
        grad = log_w.exp_().mul_(of.outside.unsqueeze(-1))
    else:
        log_w.clamp_(min=_log_of_zero(z.dtype))  # −inf · 0 would be NaN
        factor = log_w + of.tail_entropy.unsqueeze(-1)
        factor.mul_(-of.tail_entropy_gradient.unsqueeze(-1)).add_(of.outside.unsqueeze(-1))
        grad = log_w.exp_().mul_(factor)
    grad.mul_(slope)
    at, slot, column = _entries(support, tile)
    grad[at, column] = of.on_support[at, slot]
    return grad.masked_fill_(of.log_outside.isnan().unsqueeze(-1), 0)


def clear(values: Tensor, rows: Tensor) -> None:
    """Writes 0 to the rows of (L, W) values that a mask (L,) names, in place."""
    values.masked_fill_(rows.unsqueeze(-1), 0)


def _entries(support: Support, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Row, slot and column of every token of the support that lies in a tile."""
    ids = support.ids
    at, slot = ((ids >= max(tile.first, 0)) & (ids < tile.first + tile.width)).nonzero(as_tuple=True)
    return at, slot, ids[at, slot] - tile.first


def _log_of_zero(dtype: torch.dtype) -> float:
    # Below this the exponential is 0 in float32, and for the entropy as good as 0 in float64.
    return math.log(torch.finfo(dtype).smallest_normal) - 20
