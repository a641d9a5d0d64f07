"""Reading a support from logits: its tokens, their log-probabilities, and the mass of all others.

Rows are read a few at a time, since a float32 copy of all would be larger than the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from troll.trust_region.support import Top, as_float, nan_unless_finite, top_ids

if TYPE_CHECKING:
    from troll.trust_region.vocab_parallel import Vocabulary

#: Logits that are held in float32 at a time.
ROW_TILE = 2**26


@dataclass(frozen=True)
class LogitRows:
    """Some rows of (L, V) logits.

    Attributes:
        logits: (L, V).
        index: Which rows, (N,) int64, all different; None for all of them, N = L.
    """

    logits: Tensor
    index: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, index: Tensor | None = None) -> LogitRows:
        """Of (..., V) logits, flattened."""
        return cls(logits.reshape(-1, logits.shape[-1]), None if index is None else index.long())

    def __len__(self) -> int:
        return len(self.logits) if self.index is None else len(self.index)

    def tiles(self) -> Iterator[slice]:
        """The rows in parts that are read together; one part where there are none, so that shapes are known."""
        step = max(1, ROW_TILE // self.logits.shape[-1])
        for start in range(0, max(1, len(self)), step):
            yield slice(start, min(start + step, len(self)))

    def read(self, tile: slice) -> Tensor:
        """(tile, V), in float32 (float64 for float64)."""
        return as_float(self.logits[tile] if self.index is None else self.logits[self.index[tile]])

    def new_gradient(self) -> Tensor:
        """(L, V), to be written to; 0 in all rows that are not read."""
        return torch.empty_like(self.logits) if self.index is None else torch.zeros_like(self.logits)

    def write(self, gradient: Tensor, tile: slice, values: Tensor) -> None:
        """Writes (tile, V) values to the rows of a :meth:`new_gradient`."""
        gradient[tile if self.index is None else self.index[tile]] = values.to(gradient.dtype)


def top_of_logits(rows: LogitRows, sampled: Tensor, k: int, vocabulary: Vocabulary) -> Top:
    """What a capture needs, from logits.

    Args:
        rows: N rows of V logits, or of this process's slice of them.
        sampled: (N, 1).
        k: At most V.
        vocabulary: What of it this process holds.
    """
    tops = [_top_of_tile(rows.read(tile), sampled[tile], k, vocabulary.start) for tile in rows.tiles()]
    top = vocabulary.merge_top(Top(*(torch.cat(parts) for parts in zip(*tops, strict=True))), sampled, k)
    return top._replace(log_total=nan_unless_finite(top.log_total))


def _top_of_tile(z: Tensor, sampled: Tensor, k: int, first: int) -> Top:
    ids = top_ids(z, min(k, z.shape[-1]))
    column = sampled - first
    # Where another process holds the sampled token, a column that is taken out in any case stands in for it.
    column = torch.where((column >= 0) & (column < z.shape[-1]), column, ids[..., :1])
    return Top(
        ids=ids + first,
        logits=z.gather(-1, ids),
        sampled_logit=z.gather(-1, column),
        log_total=torch.logsumexp(z, dim=-1, keepdim=True),
        log_rest=torch.logsumexp(z.scatter(-1, torch.cat([ids, column], -1), -torch.inf), -1, keepdim=True),
    )


def log_probs_on_support(
    logits: Tensor, token_ids: Tensor, vocabulary: Vocabulary, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of some tokens and of all others together, differentiable in the logits.

    Args:
        logits: (..., V), or this process's slice of them; with `rows`, (L, V).
        token_ids: (..., K), different ids; −1 in unused slots.
        vocabulary: What of it this process holds.
        rows: Which rows of the logits are read, (N,), for token ids (N, K).

    Returns:
        (..., K), −inf in unused slots, and (...), −inf where no other token is left or possible. NaN for a row that is
        no distribution, which also has no gradient.
    """
    log_probs, tail_log_prob = _OnSupport.apply(logits, rows, token_ids.reshape(-1, token_ids.shape[-1]), vocabulary)
    return log_probs.view(token_ids.shape), tail_log_prob.view(token_ids.shape[:-1])


class _Columns(NamedTuple):
    """Where some logits, which may be a slice of the vocabulary, hold the tokens of a support.

    A slot whose token they lack repeats the row's first that they have, so that a scatter sees its column and value
    again; a row of which they have none repeats one column.
    """

    column: Tensor
    """(..., K) int64, in range."""
    slot: Tensor
    """(..., K) int64, which slot's token that is."""
    some: Tensor
    """(..., 1) bool, whether the row has any."""

    @classmethod
    def of(cls, token_ids: Tensor, first: int, width: int) -> _Columns:
        here = (token_ids >= first) & (token_ids < first + width)
        slots = torch.arange(token_ids.shape[-1], device=token_ids.device)
        slot = torch.where(here, slots, here.to(torch.uint8).argmax(-1, keepdim=True))
        column = (token_ids - first).gather(-1, slot).clamp(0, width - 1)
        return cls(column, slot, here.any(-1, keepdim=True))

    def write(self, z: Tensor, on_support: Tensor | float) -> Tensor:
        """What to scatter to the columns, (..., K), so that the support's have these values."""
        return torch.where(self.some, on_support, z.gather(-1, self.column))


class _OnSupport(torch.autograd.Function):
    """The gradient of :func:`log_probs_on_support` in closed form.

    With a = ∂L/∂(log p̃) on the support, a_T for the tail and Σa over both, ``∂L/∂z_v = a_T · p̃(v | tail) − p̃_v Σa``
    outside the support, overwritten by ``a_v − p̃_v Σa`` on it: overwritten, because an addition would cancel. All that
    this takes of other processes' slices is known from the forward pass.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, index: Tensor | None, token_ids: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        rows = LogitRows.of(logits, index)
        read = [_read_support(rows.read(tile), token_ids[tile], vocabulary.start) for tile in rows.tiles()]
        on_support, total, outside = (torch.cat(parts) for parts in zip(*read, strict=True))
        on_support, *sums = vocabulary.merge_support(on_support, token_ids, total, outside)
        log_total, log_outside = (torch.logsumexp(x, dim=-1, keepdim=True) for x in sums)
        log_total = nan_unless_finite(log_total)
        ctx.save_for_backward(logits, index, token_ids, log_total, log_outside)  # type: ignore[arg-type]
        ctx.start = vocabulary.start  # type: ignore[attr-defined]
        log_probs = (on_support - log_total).masked_fill(token_ids < 0, -torch.inf)
        return log_probs, (log_outside - log_total).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_tail: Tensor) -> tuple[Tensor | None, ...]:
        logits, index, token_ids, log_total, log_outside = ctx.saved_tensors
        rows = LogitRows.of(logits, index)
        grad_log_probs = grad_log_probs.masked_fill(token_ids < 0, 0)
        grad_tail = grad_tail.unsqueeze(-1).masked_fill(log_outside == -torch.inf, 0)
        total = grad_log_probs.sum(-1, keepdim=True) + grad_tail
        in_tail = log_outside.masked_fill(log_outside == -torch.inf, 0)
        grad_logits = rows.new_gradient()
        for tile in rows.tiles():
            z = rows.read(tile)
            columns = _Columns.of(token_ids[tile], ctx.start, z.shape[-1])
            grad = torch.exp(z - log_total[tile]).mul_(-total[tile])
            on_support = grad.gather(-1, columns.column) + grad_log_probs[tile].gather(-1, columns.slot)
            grad.add_(torch.exp(z - in_tail[tile]).mul_(grad_tail[tile]))
            grad.scatter_(-1, columns.column, columns.write(grad, on_support))
            # A row that is not a distribution has no gradient; its values are NaN, which the metrics count.
            rows.write(grad_logits, tile, grad.masked_fill_(log_total[tile].isnan(), 0))
        return grad_logits.view(logits.shape), None, None, None


def _read_support(z: Tensor, token_ids: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logits on a support, (N, K), and the log-sum-exp of all and of all others, (N,); of (N, V) or a slice."""
    columns = _Columns.of(token_ids, first, z.shape[-1])
    others = z.scatter(-1, columns.column, columns.write(z, -torch.inf))
    return z.gather(-1, columns.column), torch.logsumexp(z, dim=-1), torch.logsumexp(others, dim=-1)
