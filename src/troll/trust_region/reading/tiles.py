"""Tiles: some tokens' logits for some entries of the vocabulary, and the operations on them.

`Tile` computes with torch. `TritonTile`, in `tiles_triton`, does the same on a GPU; `kernels.use_triton` chooses.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..policy.top import top_ids
from ..probabilities import as_float

#: Tokens that are computed at once where an operation needs a copy of its operand: memory of that size is kept for the
#: next time, while a whole tile's goes back to the system and returns page by page.
ROWS = 64

#: Elements of the weight that torch gathers at once for single logits.
GATHERED = 2**24

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


class Support(NamedTuple):
    """The vocabulary entries to read, at most K for each of n tokens."""

    ids: Tensor
    """(n, K) int64, different in a row; −1 in unused slots."""
    ascending: Tensor
    """(n, K) int64: the same ids in ascending order; `NO_TOKEN` for the unused slots, which come last.

    Only the Triton kernel needs them: it leaves each out of the sums when it comes to its column.
    """

    @classmethod
    def from_ids(cls, ids: Tensor) -> Support:
        """Makes a support from its ids, (n, K)."""
        return cls(ids, ids.masked_fill(ids < 0, NO_TOKEN).sort(-1).values)


class TailSums(NamedTuple):
    """Running sums over the logits outside a support, relative to their running maximum m, each (N,).

    They are never differences of two sums: the support is left out before anything is added.
    """

    maximum: Tensor
    exp_sum: Tensor
    """`Σ e^{z − m}`."""
    weighted_sum: Tensor | None = None
    """`Σ e^{z − m} (z − m)`, for the entropy; all its terms have one sign."""

    @classmethod
    def empty(cls, logits: Tensor, entropy: bool) -> TailSums:
        """The sums before the first tile, for the tokens of a support's logits, (N, K)."""
        zeros = logits.new_zeros(len(logits))
        return cls(torch.full_like(zeros, -torch.inf), zeros, zeros.clone() if entropy else None)

    def over_slices(self) -> TailSums:
        """The sums over the whole vocabulary, (N,), from those over n slices of it, (N, n)."""
        if self.maximum.shape[-1] == 1:  # what follows would take six launches more
            maximum, exp_sum, weighted_sum = (None if x is None else x.squeeze(-1) for x in self)
            assert maximum is not None and exp_sum is not None
            return TailSums(maximum, exp_sum.masked_fill(maximum == -torch.inf, 0), weighted_sum)
        maximum = self.maximum.amax(-1, keepdim=True)
        moved = self.maximum - maximum.masked_fill(maximum == -torch.inf, 0)
        moved = moved.clamp(min=torch.finfo(maximum.dtype).min)
        weight = moved.exp()
        weighted_sum = self.weighted_sum
        if weighted_sum is not None:
            moved = moved.masked_fill(weight == 0, 0)
            weighted_sum = ((weighted_sum + self.exp_sum * moved) * weight).sum(-1)
        return TailSums(maximum.squeeze(-1), (self.exp_sum * weight).sum(-1), weighted_sum)

    @property
    def log_sum(self) -> Tensor:
        """`log Σ e^z`, (N,); −inf where nothing is outside."""
        return self.maximum + self.exp_sum.log()

    @property
    def entropy(self) -> Tensor | None:
        """The entropy within the tokens outside, (N,), in nats; 0 where there are none; None without a weighted sum."""
        if self.weighted_sum is None:
            return None
        # −Σ w log w with w = e^{z − m}/Σ: the logarithm of Σ and the mean of m − z, neither of which is negative.
        return (self.exp_sum.log() - self.weighted_sum / self.exp_sum).masked_fill(self.exp_sum == 0, 0)


class Upstream(NamedTuple):
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
    """H, the entropy within the tokens outside, (N,); None where no gradient arrives through it."""
    tail_entropy_gradient: Tensor | None
    """h = ∂L/∂H, (N,)."""


class TensorRows(NamedTuple):
    """N rows of W numbers that lie somewhere in a tensor."""

    values: Tensor
    """(..., W) with contiguous columns."""
    row_index: Tensor | None = None
    """(N,) int64, which of the (L, W) values the rows are; None for all of (..., W), one after the other."""


OfTokens = TypeVar("OfTokens", Support, TailSums, Upstream)


def rows_of(numbers: OfTokens, rows: slice) -> OfTokens:
    """The numbers of some tokens, sharing memory."""
    return numbers._replace(**{name: x[rows] for name, x in numbers._asdict().items() if x is not None})


class Tile:
    """The logits of n tokens for W entries of the vocabulary, by torch.

    Args:
        logits: (n, W) in float32 or float64, whose memory may be overwritten.
        transform: The map from the source's numbers to these logits.
        first: The vocabulary entry of the first column.
        rows: Which of a reading's N tokens they are.
        columns: Which of the entries that this process holds.
    """

    #: Whether a tile of a tensor works on its own copy of the numbers and overwrites it. Such tiles are small, and
    #: cannot be kept for the backward pass.
    copies: ClassVar[bool] = True

    def __init__(self, logits: Tensor, transform: Transform, first: int, rows: slice, columns: slice) -> None:
        self.logits, self.transform = logits, transform
        self.first, self.rows, self.columns = first, rows, columns

    @staticmethod
    def gathered_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, first: int) -> Tensor:
        """`hidden · weight[id] + bias[id]` in float32, (N, K), with operands rounded to the hidden states' dtype.

        Args:
            hidden: The hidden states, (N, H).
            weight: The head's weight, (V, H), in any dtype; a slice of it has fewer rows.
            bias: The head's bias, (V,), or None.
            ids: The vocabulary entries, (N, K); an entry without a row in the weight gets −inf.
            first: The vocabulary entry of the weight's first row.
        """
        step = max(1, GATHERED // max(1, ids.shape[-1] * hidden.shape[-1]))
        here = (ids >= first) & (ids < first + len(weight))
        at = torch.where(here, ids - first, 0)
        with torch.autocast(hidden.device.type, enabled=False):  # it would compute in half precision
            products = [
                torch.bmm(weight[some].to(hidden.dtype).float(), part.float().unsqueeze(-1)).squeeze(-1)
                for part, some in zip(hidden.split(step), at.split(step), strict=True)
            ]
        total = torch.cat(products)
        total = total if bias is None else total + bias[at].float()
        return total.masked_fill(~here, -torch.inf)

    @staticmethod
    def clear(values: Tensor, rows: Tensor) -> None:
        """Writes 0 to the rows of (L, W) values where a mask (L,) is true, in place."""
        values.masked_fill_(rows.unsqueeze(-1), 0)

    @classmethod
    def of_product(cls, product: Tensor, transform: Transform, first: int, rows: slice, columns: slice) -> Tile:
        """A tile of a head's product, (n, W), which may be overwritten."""
        return cls(transform(product), transform, first, rows, columns)

    @classmethod
    def of_tensor(cls, tensor: TensorRows, transform: Transform, first: int, rows: slice) -> Tile:
        """A tile of some rows of a tensor, which is not changed."""
        values, row_index = tensor
        if row_index is not None:
            z = as_float(values[row_index[rows]])
        elif values.dim() == 2:
            z = as_float(values[rows])
            z = z.clone() if z.dtype == values.dtype else z
        else:
            at = torch.arange(rows.start, rows.stop, device=values.device)
            z = as_float(values[torch.unravel_index(at, values.shape[:-1])])
        return cls(transform(z), transform, first, rows, slice(0, values.shape[-1]))

    def select(self, sampled: Tensor, k: int, logits: Tensor, outside: TailSums) -> Tensor:
        """Finds the k largest logits and reads them, the sampled tokens', and the sums over all others.

        The tile has whole rows of the vocabulary entries that this process holds, and may be lost.

        Args:
            sampled: The sampled tokens, (n,), anywhere in the vocabulary.
            k: The number of largest logits, at most W.
            logits: (n, k + 1), −inf, which receives the logits.
            outside: The n tokens' empty sums, which receive those over all other logits.

        Returns:
            Ids, (n, k + 1): of the k largest logits, ties by the smaller id, in ascending order; and in the last slot
            the sampled token, −1 where it is among the others or not in this tile.
        """
        # The search needs several integers for each block of logits, so it goes through `ROWS` rows at a time.
        ids = torch.cat([self.first + top_ids(z, k).sort(-1).values for z in self.logits.split(ROWS)])
        sampled = sampled.unsqueeze(-1)
        elsewhere = (sampled < self.first) | (sampled >= self.first + self.logits.shape[-1])
        known = elsewhere | (ids == sampled).any(-1, keepdim=True)
        ids = torch.cat([ids, sampled.masked_fill(known, -1)], -1)
        self.read(Support.from_ids(ids), logits, outside)
        return ids

    def read(self, support: Support, logits: Tensor, outside: TailSums) -> None:
        """Reads a support's logits and adds all others to the running sums, in place; the tile may be lost.

        Args:
            support: The support of the n tokens, with K slots.
            logits: (n, K), which receives the logits of the support's tokens that are in this tile.
            outside: The n tokens' running sums.
        """
        z = self.logits
        at, slot, column = self._entries(support)
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

    def gradient(self, support: Support, upstream: Upstream) -> Tensor:
        """The gradient with respect to the source's numbers, (n, W), in the tile's memory; 0 in rows without one."""
        z = self.logits
        slope = self.transform.slope(z)
        log_w = z.sub_(upstream.log_outside.unsqueeze(-1))
        if upstream.tail_entropy is None or upstream.tail_entropy_gradient is None:
            grad = log_w.exp_().mul_(upstream.outside.unsqueeze(-1))
        else:
            log_w.clamp_(min=_log_of_zero(z.dtype))  # −inf · 0 would be NaN
            factor = log_w + upstream.tail_entropy.unsqueeze(-1)
            factor.mul_(-upstream.tail_entropy_gradient.unsqueeze(-1)).add_(upstream.outside.unsqueeze(-1))
            grad = log_w.exp_().mul_(factor)
        grad.mul_(slope)
        at, slot, column = self._entries(support)
        grad[at, column] = upstream.on_support[at, slot]
        return grad.masked_fill_(upstream.log_outside.isnan().unsqueeze(-1), 0)

    def write_gradient(self, support: Support, upstream: Upstream, out: TensorRows) -> None:
        """Computes `gradient` and writes it to the same rows of a tensor, in the tensor's dtype."""
        rows = out.values.view(-1, out.values.shape[-1])
        gradient = self.gradient(support, upstream)
        rows[self.rows if out.row_index is None else out.row_index[self.rows]] = gradient.to(rows.dtype)

    def _entries(self, support: Support) -> tuple[Tensor, Tensor, Tensor]:
        """Row, slot and column of every token of the support that lies in the tile."""
        ids, end = support.ids, self.first + self.logits.shape[-1]
        at, slot = ((ids >= max(self.first, 0)) & (ids < end)).nonzero(as_tuple=True)
        return at, slot, ids[at, slot] - self.first


def _entropy_sums(z: Tensor) -> tuple[Tensor, Tensor]:
    z.clamp_(min=_log_of_zero(z.dtype))  # −inf · 0 would be NaN
    exp = z.exp()
    with torch.autocast(z.device.type, enabled=False):  # it would compute in half precision
        return exp.sum(-1), torch.bmm(exp.unsqueeze(1), z.unsqueeze(2)).flatten()


def _log_of_zero(dtype: torch.dtype) -> float:
    # Below this the exponential is 0 in float32, and negligible for the entropy in float64.
    return math.log(torch.finfo(dtype).smallest_normal) - 20
