"""The operations on a tile, some tokens' logits for some entries of the vocabulary: select, fold, and gradient.

`fold_triton` and `select_triton` have the same functions for a GPU; `kernels.use_triton` chooses.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from troll.trust_region.policy.top import top_ids
from troll.trust_region.policy.values import as_float

#: Tokens that are computed at once where an operation needs a copy of its operand: memory of that size is kept for the
#: next time, while a whole tile's goes back to the system and returns page by page.
ROWS = 64

#: The entry of `ascending` for an unused slot: larger than any token id.
NO_TOKEN = 2**31 - 1


class Transform(NamedTuple):
    """Maps the numbers of a source to logits, `softcap · tanh(scale · x / softcap) / temperature`."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """The logits in float32 (float64 for float64); may overwrite `raw`."""
        z = as_float(raw)
        if self.scale != 1.0:
            z = z.mul_(self.scale)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | float:
        """The derivative of the logits with respect to the numbers of the source, at logits z."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1 - (z * (self.temperature / self.softcap)).square_()).mul_(factor)


class Tile(NamedTuple):
    """The logits of n tokens for W entries of the vocabulary."""

    values: Tensor
    """For the torch functions: logits, (n, W), in float32 or float64, whose memory may be overwritten.

    For the Triton functions: the numbers of the source, in their own dtype, to be transformed; (n, W) with contiguous
    columns, or, with `offsets`, any tensor. Only a gradient may be written to it.
    """
    first: int
    """The vocabulary entry of the first column."""
    width: int
    """W, the number of columns."""
    transform: Transform
    offsets: Tensor | None = None
    """(n,) int64: where each row begins in the memory of `values`, in elements; multiples of its strides.

    None for (n, W) values."""


class Support(NamedTuple):
    """The vocabulary entries to read, at most K for each of n tokens."""

    ids: Tensor
    """(n, K) int64, different in a row; −1 in unused slots."""
    ascending: Tensor
    """(n, K) int64: the same ids in ascending order; `NO_TOKEN` for the unused slots, which come last."""

    @classmethod
    def of(cls, ids: Tensor) -> Support:
        """Makes a support from its ids, (n, K)."""
        return cls(ids, ids.masked_fill(ids < 0, NO_TOKEN).sort(-1).values)


class Outside(NamedTuple):
    """Running sums over the logits outside a support, relative to their running maximum m, each (N,).

    They are never differences of two sums: the support is left out before anything is added.
    """

    maximum: Tensor
    exp_sum: Tensor
    """`Σ e^{z − m}`."""
    weighted_sum: Tensor | None = None
    """`Σ e^{z − m} (z − m)`, for the entropy; all its terms have one sign."""

    @classmethod
    def empty(cls, logits: Tensor, entropy: bool) -> Outside:
        """The sums before the first tile, for the tokens of a support's logits, (N, K)."""
        zeros = logits.new_zeros(len(logits))
        return cls(torch.full_like(zeros, -torch.inf), zeros, zeros.clone() if entropy else None)

    def over_slices(self) -> Outside:
        """The sums over the whole vocabulary, (N,), from those over n slices of it, (N, n)."""
        maximum = self.maximum.amax(-1, keepdim=True)
        moved = self.maximum - maximum.masked_fill(maximum == -torch.inf, 0)
        moved = moved.clamp(min=torch.finfo(maximum.dtype).min)
        weight = moved.exp()
        weighted_sum = self.weighted_sum
        if weighted_sum is not None:
            moved = moved.masked_fill(weight == 0, 0)
            weighted_sum = ((weighted_sum + self.exp_sum * moved) * weight).sum(-1)
        return Outside(maximum.squeeze(-1), (self.exp_sum * weight).sum(-1), weighted_sum)

    @property
    def log_sum(self) -> Tensor:
        """`log Σ e^z`, (N,); −inf where nothing is outside."""
        return self.maximum + self.exp_sum.log()

    @property
    def entropy(self) -> Tensor | None:
        """The entropy of the tokens outside among themselves, (N,), in nats; 0 where there are none.

        None if the weighted sum was not asked for.
        """
        if self.weighted_sum is None:
            return None
        # −Σ w log w with w = e^{z − m}/Σ: the logarithm of Σ and the mean of m − z, neither of which is negative.
        return (self.exp_sum.log() - self.weighted_sum / self.exp_sum).masked_fill(self.exp_sum == 0, 0)


class SupportGradient(NamedTuple):
    """The numbers of each token from which the gradient with respect to its logits follows.

    Outside the support it is `w_v (a − h (log w_v + H))` with `w_v = e^{z_v − log_outside}`; on it, `on_support`.
    """

    log_outside: Tensor
    """(N,), the log-sum-exp over the logits outside the support; 0 instead of −inf, NaN in a row without a gradient."""
    outside: Tensor
    """a = ∂L/∂(log_outside), (N,)."""
    on_support: Tensor
    """(N, K), the gradient with respect to the source's numbers on the support, written over the formula's."""
    tail_entropy: Tensor | None
    """H, the entropy of the tokens outside among themselves, (N,); None where no gradient arrives through it."""
    tail_entropy_gradient: Tensor | None
    """h = ∂L/∂H, (N,)."""


OfTokens = TypeVar("OfTokens", Support, Outside, SupportGradient)


def rows_of(numbers: OfTokens, rows: slice) -> OfTokens:
    """The numbers of some tokens, sharing memory."""
    return numbers._replace(**{name: x[rows] for name, x in numbers._asdict().items() if x is not None})


def select(tile: Tile, sampled: Tensor, k: int) -> Support:
    """The k largest logits of a tile, and the sampled tokens.

    Args:
        tile: The logits, (n, W); they are not changed.
        sampled: The sampled tokens, (n,), anywhere in the vocabulary.
        k: The number of largest logits, at most W.

    Returns:
        A support of k + 1 slots: the k largest, ties by the smaller id, in ascending order of their ids; and in the
        last slot the sampled token. That slot is unused where the token is among the others, or not in this tile.
    """
    ids = tile.first + top_ids(tile.values, k).sort(-1).values
    sampled = sampled.unsqueeze(-1)
    elsewhere = (sampled < tile.first) | (sampled >= tile.first + tile.width)
    known = elsewhere | (ids == sampled).any(-1, keepdim=True)
    return Support.of(torch.cat([ids, sampled.masked_fill(known, -1)], -1))


def fold_support(tile: Tile, support: Support, logits: Tensor, outside: Outside) -> None:
    """Reads a support's logits from a tile and adds all others to the running sums, in place.

    Args:
        tile: The logits of n tokens, (n, W).
        support: The support of the n tokens, with K slots.
        logits: (n, K), which receives the logits of the support's tokens that are in this tile.
        outside: The n tokens' running sums.
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
    """The gradient with respect to the source's numbers, (n, W), in the tile's memory; 0 in rows without one.

    Args:
        tile: The logits of n tokens, (n, W).
        support: The support of the n tokens, with K slots.
        of: The n tokens' numbers for the gradient.
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
    """Writes 0 to the rows of (L, W) values where a mask (L,) is true, in place."""
    values.masked_fill_(rows.unsqueeze(-1), 0)


def _entries(support: Support, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Row, slot and column of every token of the support that lies in a tile."""
    ids = support.ids
    at, slot = ((ids >= max(tile.first, 0)) & (ids < tile.first + tile.width)).nonzero(as_tuple=True)
    return at, slot, ids[at, slot] - tile.first


def _log_of_zero(dtype: torch.dtype) -> float:
    # Below this the exponential is 0 in float32, and negligible for the entropy in float64.
    return math.log(torch.finfo(dtype).smallest_normal) - 20
