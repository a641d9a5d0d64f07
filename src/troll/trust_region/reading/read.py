"""Reads the logits of a support's tokens, and the log-sum-exp of all other logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..checks import check_distinct, check_integers, check_shape, check_tokens_in
from ..policy.on_support import PolicyOnSupport
from ..probabilities import float_dtype
from .logits import Logits
from .source import LogitsSource
from .tiles import Support, TailSums, Upstream, rows_of


def read(source: LogitsSource, token_ids: Tensor, *, entropy: bool = False) -> PolicyOnSupport:
    """Reads a source's policy on a support, differentiable in the source's tensors.

    The tail is the log-sum-exp over the support's complement, added up tile by tile without the support. So a tail of
    any mass that float32 can represent (down to 1e-38) is accurate, even if the support has almost all of the mass. The
    support's logits are float32 even if the tiles are a product of half precision.

    Args:
        source: Logits of the positions (...).
        token_ids: The support, (..., K) integers, distinct within a row; −1 in unused slots.
        entropy: Whether the entropy of all other tokens is read too.
    """
    ids = token_ids.reshape(-1, token_ids.shape[-1]).long()
    logits, tail_logit, tail_entropy = _Read.apply(source, ids, entropy, torch.is_grad_enabled(), *source.tensors)
    return PolicyOnSupport(
        token_ids,
        logits.view(token_ids.shape),
        tail_logit.view(source.shape),
        source.vocabulary.size,
        None if tail_entropy is None else tail_entropy.view(source.shape),
        source.temperature,
    )


def log_probs_at(source: LogitsSource | Tensor, token_ids: Tensor) -> PolicyOnSupport:
    """Reads the log-probabilities of given tokens, and of all other tokens together, differentiably.

    Args:
        source: Logits (..., V), or any source.
        token_ids: (..., K) integers in [0, V), distinct within a row; −1 in unused slots.

    Returns:
        The policy on these tokens, with `.log_probs` (..., K) and `.tail_log_prob` (...). A row that is not a
        distribution has NaN and no gradient.

    Raises:
        ValueError: If shapes or dtypes do not fit; for tensors on a CPU, if ids are outside the vocabulary, or one
            occurs twice in a row.
    """
    source = Logits(source, temperature=None) if isinstance(source, Tensor) else source
    check_integers("token_ids", token_ids)
    check_shape("token_ids", token_ids, (*source.shape, token_ids.shape[-1] if token_ids.dim() else "K"))
    if token_ids.device.type == "cpu":
        check_tokens_in("token_ids", token_ids, source.vocabulary.size, or_unused=True)
        check_distinct("token_ids", token_ids)
    return read(source, token_ids)


class _Read(torch.autograd.Function):
    """Reads in one pass over the tiles; the backward pass is another, which writes every logit's gradient.

    `Upstream` has the formula for logits outside the support, with a = ∂L/∂(tail_logit) and h = ∂L/∂(tail_entropy). A
    logit on the support has the gradient that arrives at its slot, which is written over what the formula gives: an
    addition would cancel.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        source: LogitsSource,
        token_ids: Tensor,
        entropy: bool,
        differentiated: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        tokens, slots = token_ids.shape
        support = Support.from_ids(token_ids)
        with source.with_tensors(*tensors).reading(source.tile_class(slots)) as reading:
            dtype = float_dtype(reading.dtype)
            logits = torch.full((tokens, slots), -torch.inf, dtype=dtype, device=token_ids.device)
            outside = TailSums.empty(logits, entropy)
            if differentiated:
                reading.keep(ctx.needs_input_grad[4:])  # type: ignore[attr-defined]
            for tile in reading.tiles():
                tile.read(rows_of(support, tile.rows), logits[tile.rows], rows_of(outside, tile.rows))
            exact = reading.exact(token_ids)
            sums = (x for x in outside if x is not None)
            logits, *merged = reading.vocabulary.merge_support(logits if exact is None else exact, token_ids, *sums)
        outside = TailSums(*merged).over_slices()
        tail_logit, tail_entropy = outside.log_sum, outside.entropy
        ctx.save_for_backward(*tensors, *support, logits, tail_logit, tail_entropy)  # type: ignore[arg-type]
        ctx.source = source.with_tensors(*(None for _ in tensors))  # type: ignore[attr-defined]
        ctx.tile, ctx.dtype = reading.tile, reading.dtype  # type: ignore[attr-defined]
        ctx.kept, ctx.spent = reading.kept, False  # type: ignore[attr-defined]
        return logits, tail_logit, tail_entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logits: Tensor | None, grad_tail: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "these logits were donated and now hold their gradient: a second backward pass needs donate=False"
            )
        ctx.spent = getattr(ctx.source, "donate", False)
        *tensors, ids, ascending, logits, tail_logit, tail_entropy = ctx.saved_tensors
        total = torch.logsumexp(torch.cat([logits, tail_logit.unsqueeze(-1)], -1), -1)
        broken = ~total.isfinite()  # an invalid row has no gradient
        nothing_outside = tail_logit == -torch.inf
        absent = (ids < 0) | broken.unsqueeze(-1)
        on_support = torch.zeros_like(logits) if grad_logits is None else grad_logits.masked_fill(absent, 0)
        outside = torch.zeros_like(total) if grad_tail is None else grad_tail.masked_fill(nothing_outside | broken, 0)
        upstream = Upstream(
            tail_logit.masked_fill(nothing_outside, 0).masked_fill(broken, torch.nan),
            outside,
            on_support * ctx.source.transform.slope(logits.masked_fill(absent, 0)),
            None if grad_entropy is None else tail_entropy,
            grad_entropy,
        )
        with ctx.source.with_tensors(*tensors).reading(ctx.tile, ctx.dtype) as reading:
            # They receive the gradient: a second backward pass computes them again.
            reading.kept, ctx.kept = ctx.kept, []
            gradients = reading.gradients(Support(ids, ascending), upstream, ctx.needs_input_grad[4:])
        return None, None, None, None, *gradients
