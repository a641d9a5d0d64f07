"""The LM head, from hidden states to what a sparse policy needs, in tiles: never a (tokens x vocabulary) tensor.

A tile is the logits of some tokens for a slice of the vocabulary. Forward and backward make each tile, fold it into
per-token numbers, and drop it; the backward makes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from troll.trust_region.kernels.tile import Outside, TileGradient, Transform
from troll.trust_region.support import (
    BLOCK,
    Top,
    as_float,
    candidate_ids,
    keep,
    missing_from,
    nan_unless_finite,
    top_ids,
)
from troll.trust_region.tiles import Tiles
from troll.trust_region.vocab_parallel import Vocabulary, held_vocabulary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Tokens and vocabulary entries of a tile.
TOKEN_TILE, VOCABULARY_TILE = 4096, 32768

#: Fewer tokens in a capture, which has 64 candidates to sort for each of its K tokens.
CAPTURE_TOKEN_TILE = 1024


@dataclass(frozen=True)
class Head:
    """An LM head, ``logits = softcap · tanh(logit_scale · (hidden @ weight.T + bias) / softcap) / temperature``.

    The product is computed in `compute_dtype`, all that follows in float32 (float64 for float64).

    Attributes:
        weight: (V, H), or this process's slice of it.
        bias: (V,), or None; sliced as the weight is.
        transform: Temperature, the model's scale of its logits, and its final softcap.
        compute_dtype: None for the hidden states' own, or autocast's where it is on.
        gathered: Called with weight and bias, and entered around every use of them, backward included; for parameters
            that are sharded.
        vocab_group: The processes over which the vocabulary is spread; None where this one holds all of it. See
            :mod:`~troll.trust_region.vocab_parallel`.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: Transform = field(default_factory=Transform)
    compute_dtype: torch.dtype | None = None
    gathered: Callable[[Tensor, Tensor | None], AbstractContextManager[Any]] = lambda weight, bias: nullcontext()
    vocab_group: ProcessGroup | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """What of the vocabulary this process holds."""
        return held_vocabulary(len(self.weight), self.vocab_group)

    @property
    def vocab_size(self) -> int:
        """V, of all processes together."""
        return self.vocabulary.size

    def check(self, hidden: Tensor, positions: Tensor) -> None:
        """Raises ValueError unless the head fits hidden states (..., H) of the given token positions (...)."""
        if self.weight.dim() != 2 or not len(self.weight):
            raise ValueError(f"lm_head_weight must be (V, H), got {tuple(self.weight.shape)}")
        expected = (*positions.shape, self.weight.shape[1])
        if hidden.shape != expected or not hidden.is_floating_point():
            raise ValueError(f"hidden must be floating point {expected}, got {hidden.dtype} {tuple(hidden.shape)}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias must be {tuple(self.weight.shape[:1])}, got {tuple(self.bias.shape)}")
        for name in ("temperature", "softcap"):
            value = getattr(self.transform, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    def for_(self, hidden: Tensor) -> Head:
        """With the dtype in which the product of these hidden states is computed, autocast included."""
        if self.compute_dtype is not None:
            return self
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        return dataclasses.replace(self, compute_dtype=torch.get_autocast_dtype(device) if autocast else hidden.dtype)


def top_from_hidden(hidden: Tensor, head: Head, token_ids: Tensor, k: int) -> Top:
    """The K largest logits of each token, the sampled one's, and the log-sum-exps that normalise them.

    The same as a stable descending sort of the full logits, ties included. Whatever leaves the running top K is
    added to the log-sum-exp of the rest, so that no mass is ever the difference of two.

    Args:
        hidden: (N, H).
        head: With V entries.
        token_ids: The sampled tokens, (N,).
        k: At most V.
    """
    with head.gathered(head.weight, head.bias):
        head = head.for_(hidden)
        tiles = Tiles(hidden, head, 1, (CAPTURE_TOKEN_TILE, VOCABULARY_TILE))
        parts = [_top_of_rows(tiles, part, token_ids[rows], k) for rows, part in tiles.rows()]
        if not parts:
            parts = [_top_of_rows(tiles, hidden.to(head.compute_dtype), token_ids, k)]
    top = Top(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    top = tiles.vocabulary.merge_top(top, token_ids.long().unsqueeze(-1), k)
    return top._replace(log_total=nan_unless_finite(top.log_total))


def _top_of_rows(tiles: Tiles, hidden: Tensor, token_ids: Tensor, k: int) -> Top:
    """As :func:`top_from_hidden`, but of the entries that this process holds."""
    vocabulary = tiles.vocabulary
    k = min(k, vocabulary.width)
    values = as_float(hidden.new_empty((len(hidden), 0), dtype=tiles.memory.dtype))
    ids = token_ids.new_empty((len(hidden), 0), dtype=torch.int64)
    sampled_logit = values.new_full((len(hidden),), -torch.inf)
    rest = values.new_full((len(hidden), 1), -torch.inf)
    for columns, first in tiles.columns():
        tile = tiles.product(hidden, columns, padded=True)
        # The sampled token is set aside, and the k largest of the others found.
        logits_at, maxima, log_sums = tiles.functions.fold_blocks(
            tile, first, columns.stop - columns.start, tiles.head.transform, token_ids, sampled_logit
        )
        best, best_ids, others = _top_of_tile(logits_at, maxima, log_sums, min(k, columns.stop - columns.start))
        # Earlier tiles have smaller ids, so position is the order among equals.
        values, ids = torch.cat([values, best], -1), torch.cat([ids, best_ids + first], -1)
        order = top_ids(values, min(k, values.shape[-1]))
        evicted = torch.logsumexp(values.scatter(-1, order, -torch.inf), -1, keepdim=True)
        values, ids = values.gather(-1, order), ids.gather(-1, order)
        rest = torch.logaddexp(torch.logaddexp(rest, others), evicted)

    # The sampled token was taken out of its tile and may stand among the k as −inf: it returns with its own logit,
    # unless it is another process's.
    sampled, sampled_logit = token_ids.long().unsqueeze(-1), sampled_logit.unsqueeze(-1)
    known = ids == sampled
    values = torch.where(known, sampled_logit, values)
    known = known.any(-1, keepdim=True)
    known |= (sampled < vocabulary.start) | (sampled >= vocabulary.start + vocabulary.width)
    ids = torch.cat([ids, torch.where(known, vocabulary.size, sampled)], dim=-1)
    values = torch.cat([values, sampled_logit.masked_fill(known, -torch.inf)], dim=-1)
    total = torch.logsumexp(torch.cat([rest, values], dim=-1), dim=-1, keepdim=True)

    ids, by_id = ids.sort(dim=-1)
    values = values.gather(-1, by_id)
    order = top_ids(values, k)
    left = torch.logsumexp(
        values.scatter(-1, order, -torch.inf).masked_fill(ids == sampled, -torch.inf), -1, keepdim=True
    )
    ids, values = ids.gather(-1, order), values.gather(-1, order)
    return Top(ids, values, sampled_logit, total, torch.logaddexp(rest, left))


def _top_of_tile(
    logits_at: Callable[[Tensor], Tensor], maxima: Tensor, log_sums: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits of a tile, their columns, and the log-sum-exp of all others, (N, k), (N, k), (N, 1)."""
    candidates = candidate_ids(maxima, k)
    values = logits_at(candidates)
    best = top_ids(values, k)
    chosen = candidates[:, ::BLOCK] // BLOCK
    others = [log_sums.scatter(-1, chosen, -torch.inf), values.scatter(-1, best, -torch.inf)]
    return (
        values.gather(-1, best),
        candidates.gather(-1, best),
        torch.logsumexp(torch.cat(others, -1), dim=-1, keepdim=True),
    )


class OwnSupport(NamedTuple):
    """Asks for the support that a capture would keep, where more than `mass_threshold` lies outside the given one.

    Elsewhere it is left out. Its outcomes together then hold at most δ of the new policy's mass, and treating them as
    tokens of probability 1e-12 moves KL(p̃ ‖ p) by at most ``δ max(log(δ / 1e-12), 1 + KL)``: for δ = 1e-5 that is
    1.6e-4 nats, up to a divergence of 15.
    """

    sampled: Tensor
    """(N,)."""
    mass_threshold: float
    """δ."""


class OnSupport(NamedTuple):
    """What an LM head says of a support, for N tokens; differentiable but for the ids."""

    token_ids: Tensor
    """(N, K'): the support that was asked for, and beside it, where that was asked for, the head's own; −1 unused."""
    log_probs: Tensor
    """(N, K'), −inf in unused slots."""
    tail_log_prob: Tensor
    """(N,), of all tokens outside the support that was asked for; −inf where there is none.

    With the head's own support it is for reading only: its gradient would be wrong.
    """
    entropy: Tensor | None
    """(N,), in nats; None unless asked for."""


def log_probs_on_support_from_hidden(
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    *,
    own_support: OwnSupport | None = None,
    entropy: bool = False,
) -> OnSupport:
    """`log_probs_on_support` of the head's logits, differentiable in the hidden states and the head.

    The tail is the log-sum-exp over the support's complement, folded tile by tile with the support taken out: it
    resolves any mass that float32 can hold (1e-38), however close to 1 the rest is. The entropy is summed from
    ``p log p``, all terms of one sign. Gradients accumulate in float32.

    Args:
        hidden: (N, H).
        head: With V entries.
        token_ids: (N, K), different ids; −1 in unused slots.
        own_support: Adds the head's own support, for a floored tail.
        entropy: Whether to compute it.
    """
    head = head.for_(hidden)
    return OnSupport(*_OnSupportFromHidden.apply(hidden, head.weight, head.bias, token_ids, head, own_support, entropy))


class _OnSupportFromHidden(torch.autograd.Function):
    """Forward in one pass over the tiles; backward in another, with the gradient of `_OnSupport` on each tile."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        head: Head,
        own_support: OwnSupport | None,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        with head.gathered(weight, bias):
            tiles = Tiles(hidden, head, token_ids.shape[-1], (TOKEN_TILE, VOCABULARY_TILE))
            on_support = as_float(hidden.new_full(token_ids.shape, -torch.inf, dtype=head.compute_dtype))
            outside = Outside.empty(on_support, len(hidden), wants_entropy)
            for rows, part in tiles.rows():
                for columns, first in tiles.columns():
                    tiles.functions.fold_support(
                        tiles.product(part, columns),
                        first,
                        head.transform,
                        token_ids[rows],
                        on_support[rows],
                        outside.rows(rows),
                    )
            on_support, *sums = tiles.vocabulary.merge_support(
                on_support, token_ids, *(x for x in outside if x is not None)
            )
            del tiles
            outside = Outside(*sums)  # one column of each process
            log_outside = torch.logsumexp(outside.log_sum, dim=-1)
            total = nan_unless_finite(torch.logsumexp(torch.cat([on_support, log_outside.unsqueeze(-1)], -1), dim=-1))
            tail_log_prob = log_outside - total
            entropy = _entropy(on_support, outside, total) if wants_entropy else None
            if own_support is not None:
                rows_beyond = (tail_log_prob.exp() > own_support.mass_threshold).nonzero().squeeze(-1)
                token_ids, on_support = _with_own_support(hidden, head, token_ids, on_support, own_support, rows_beyond)
        log_probs = (on_support - total.unsqueeze(-1)).masked_fill(token_ids < 0, -torch.inf)

        ctx.save_for_backward(hidden, weight, bias, token_ids, log_probs, total, log_outside, entropy)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(token_ids)
        ctx.head = dataclasses.replace(head, weight=None, bias=None)  # type: ignore[attr-defined,arg-type]
        return token_ids, log_probs, tail_log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, *forward = ctx.saved_tensors
        head = dataclasses.replace(ctx.head, weight=weight, bias=bias)
        of = _tile_gradient(head.transform, token_ids, *forward, *grads)
        with head.gathered(weight, bias):
            tiles = Tiles(hidden, head, token_ids.shape[-1], (TOKEN_TILE, VOCABULARY_TILE))
            sums = [
                torch.zeros_like(x, dtype=of.on_support.dtype) if x is not None and needed else None
                for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
            ]
            grad_hidden, grad_weight, grad_bias = sums
            for rows, part in tiles.rows():
                for columns, first in tiles.columns():
                    product = tiles.product(part, columns)
                    grad = tiles.functions.gradient(product, first, head.transform, token_ids[rows], of.rows(rows))
                    if grad_hidden is not None:
                        _add_matrix_product(grad_hidden[rows], grad, tiles.weight)
                    if grad_weight is not None:
                        _add_matrix_product(grad_weight[columns], grad.t(), part)
                    if grad_bias is not None:
                        grad_bias[columns] += grad.sum(0, dtype=grad_bias.dtype)
            if grad_hidden is not None:
                tiles.vocabulary.add_up(grad_hidden)
            in_their_dtypes = [
                None if total is None else total.to(x.dtype)
                for total, x in zip(sums, (hidden, weight, bias), strict=True)
            ]
        return (*in_their_dtypes, None, None, None, None)


def _entropy(on_support: Tensor, outside: Outside, total: Tensor) -> Tensor:
    assert outside.weighted_sum is not None
    total = total.unsqueeze(-1)
    log_p = on_support - total
    # x eˣ, 0 for −inf
    inside = (log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    of_maximum = (outside.maximum - total).masked_fill(outside.maximum == -torch.inf, 0)
    beyond = of_maximum.exp() * (outside.weighted_sum + of_maximum * outside.exp_sum)
    return -(inside + beyond.sum(-1))


def _with_own_support(
    hidden: Tensor, head: Head, token_ids: Tensor, on_support: Tensor, own_support: OwnSupport, rows: Tensor
) -> tuple[Tensor, Tensor]:
    if not len(rows):
        return token_ids, on_support
    sampled = own_support.sampled[rows]
    top = top_from_hidden(hidden[rows], head, sampled, token_ids.shape[-1])
    own, log_probs, _ = keep(top, sampled.unsqueeze(-1), own_support.mass_threshold)
    missing = missing_from(token_ids[rows], own)
    extra_ids = torch.full_like(token_ids, -1)
    extra = torch.full_like(on_support, -torch.inf)
    extra_ids[rows] = missing
    extra[rows] = (log_probs + top.log_total).masked_fill(missing < 0, -torch.inf)
    return torch.cat([token_ids, extra_ids], -1), torch.cat([on_support, extra], -1)


def _tile_gradient(
    transform: Transform,
    token_ids: Tensor,
    log_probs: Tensor,
    total: Tensor,
    log_outside: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_tail: Tensor | None,
    grad_entropy: Tensor | None,
) -> TileGradient:
    broken, nothing_outside = total.isnan(), log_outside == -torch.inf
    absent = (token_ids < 0) | broken.unsqueeze(-1)
    on_support = torch.zeros_like(log_probs) if grad_log_probs is None else grad_log_probs.masked_fill(absent, 0)
    on_tail = torch.zeros_like(total) if grad_tail is None else grad_tail.masked_fill(nothing_outside | broken, 0)
    sum_of_grads = on_support.sum(-1) + on_tail
    outside = on_tail - (log_outside - total).exp().masked_fill(broken, 0) * sum_of_grads

    log_p = log_probs.masked_fill(absent, -torch.inf)
    p = log_p.exp()
    on_support = on_support - p * sum_of_grads.unsqueeze(-1)
    if grad_entropy is not None:
        assert entropy is not None
        surprise = log_p.masked_fill(p == 0, 0) + entropy.unsqueeze(-1)
        on_support = on_support - grad_entropy.unsqueeze(-1) * p * surprise.masked_fill(absent, 0)
    slope = transform.slope((log_probs + total.unsqueeze(-1)).masked_fill(absent, 0))
    return TileGradient(
        log_outside.masked_fill(nothing_outside, 0),
        outside,
        on_support * slope,
        total,
        None if grad_entropy is None else entropy,
        grad_entropy,
    )


def _add_matrix_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    # In the sum's precision: rounding each tile's product to bf16 first would bias training.
    if total.is_cuda and first.dtype == second.dtype != total.dtype:
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(first.to(total.dtype), second.to(total.dtype))
