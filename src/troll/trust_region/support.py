"""Reading a support from logits: its tokens, their log-probabilities, and the mass of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

#: Smaller probabilities are raised to this before a projection, and the distribution renormalised.
PROBABILITY_FLOOR = 1e-12


class Top(NamedTuple):
    """The largest logits of a distribution, and what normalises them."""

    ids: Tensor
    """(..., K), larger logit first, then smaller id."""
    logits: Tensor
    """(..., K)."""
    sampled_logit: Tensor
    """(..., 1)."""
    log_total: Tensor
    """Log-sum-exp of all tokens, (..., 1); NaN for a row that is no distribution."""
    log_rest: Tensor
    """Log-sum-exp of all but the K and the sampled one, (..., 1); −inf where there is no other."""


def as_float(tensor: Tensor) -> Tensor:
    """Float64 stays what it is; everything else is computed in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def floored(log_probs: Tensor, present: Tensor) -> Tensor:
    """Raises probabilities below 1e-12 and renormalises, (..., M); outcomes that are not `present` get −inf.

    No gradient flows through a floored entry.
    """
    raised = log_probs.clamp(min=math.log(PROBABILITY_FLOOR))
    return torch.log_softmax(raised.masked_fill(~present, -torch.inf), dim=-1)


def normaliser(z: Tensor) -> Tensor:
    """Log-sum-exp, (..., V) to (..., 1); NaN for a row with NaN, +inf, or nothing but −inf."""
    return nan_unless_finite(torch.logsumexp(z, dim=-1, keepdim=True))


def nan_unless_finite(log_total: Tensor) -> Tensor:
    """A normaliser, with NaN where it says that a row is no distribution."""
    return log_total.masked_fill(~log_total.isfinite(), torch.nan)


def logsumexp_without(z: Tensor, ids: Tensor) -> Tensor:
    """Log-sum-exp over the complement of some tokens, (..., V) and (..., K) to (..., 1); −inf where it is empty."""
    return torch.logsumexp(z.scatter(-1, ids, -torch.inf), dim=-1, keepdim=True)


def top_ids(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries, (..., V) to (..., k): larger value first, then smaller id.

    The same as a stable descending sort; `topk` does not say which of equal values it takes.
    """
    if z.dim() == 1:
        return top_ids(z.unsqueeze(0), k).squeeze(0)
    values, ids = torch.topk(z, k, dim=-1)
    threshold = values[..., -1:]
    ties = ((z == threshold).sum(-1) > (values == threshold).sum(-1)).nonzero(as_tuple=True)
    if ties[0].numel():  # in bf16, most rows
        rows, row_threshold = z[ties], threshold[ties]
        vocabulary = torch.arange(z.shape[-1], device=z.device)
        above = values[ties] > row_threshold
        smallest = vocabulary.where(rows == row_threshold, z.shape[-1]).topk(k, dim=-1, largest=False).values
        rank_among_ties = torch.arange(k, device=z.device) - above.sum(-1, keepdim=True)
        ids[ties] = torch.where(above, ids[ties], smallest.gather(-1, rank_among_ties.clamp(min=0)))
    ids = ids.sort(dim=-1).values
    order = z.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def log_probs_on_support(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of some tokens and of all others together, differentiable in the logits.

    Args:
        logits: (..., V).
        token_ids: (..., K), different ids; −1 in unused slots.

    Returns:
        (..., K), −inf in unused slots, and (...), −inf where no other token is left or possible. NaN for a row that is
        no distribution, which also has no gradient.
    """
    log_probs, tail_log_prob = _OnSupport.apply(logits, token_ids)
    return log_probs, tail_log_prob


class _OnSupport(torch.autograd.Function):
    """The gradient of :func:`log_probs_on_support` in closed form.

    With a = ∂L/∂(log p̃) on the support, a_T for the tail and Σa over both, ``∂L/∂z_v = a_T · p̃(v | tail) − p̃_v Σa``
    outside the support, overwritten by ``a_v − p̃_v Σa`` on it: overwritten, because an addition would cancel.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        z = as_float(logits)
        used = token_ids >= 0
        # Unused slots stand in for the first one, so that scatters see its id and value again.
        ids = torch.where(used, token_ids, token_ids[..., :1]).clamp(min=0)
        log_total = normaliser(z)
        log_outside = logsumexp_without(z, ids)
        ctx.save_for_backward(logits, ids, used, log_total, log_outside)
        log_probs = (z.gather(-1, ids) - log_total).masked_fill(~used, -torch.inf)
        return log_probs, (log_outside - log_total).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_tail: Tensor) -> tuple[Tensor, None]:
        logits, ids, used, log_total, log_outside = ctx.saved_tensors
        z = as_float(logits)
        grad_log_probs = grad_log_probs.masked_fill(~used, 0)
        grad_tail = grad_tail.unsqueeze(-1).masked_fill(log_outside == -torch.inf, 0)
        total = grad_log_probs.sum(-1, keepdim=True) + grad_tail

        grad = torch.exp(z - log_total).mul_(-total)
        on_support = grad.gather(-1, ids) + torch.where(used, grad_log_probs, grad_log_probs[..., :1])
        in_tail = log_outside.masked_fill(log_outside == -torch.inf, 0)
        grad.add_(torch.exp(z - in_tail).mul_(grad_tail))
        grad.scatter_(-1, ids, on_support)
        # A row that is not a distribution has no gradient; its values are NaN, which the metrics count.
        grad.masked_fill_(log_total.isnan(), 0)
        return grad.to(logits.dtype), None


def check_tokens(token_ids: Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError unless `token_ids` are integers of the given shape."""
    if token_ids.shape != torch.Size(shape):
        raise ValueError(f"token_ids must be {shape_text(shape)}, got {shape_text(token_ids.shape)}")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be integers, got {token_ids.dtype}")


def check_logits(logits: Tensor, token_ids: Tensor) -> None:
    """Raises ValueError unless (..., V) logits and (...) token ids fit each other."""
    if logits.dim() == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point (..., V), got {logits.dtype} {shape_text(logits.shape)}")
    check_tokens(token_ids, logits.shape[:-1])
    check_tokens_in(token_ids, logits.shape[-1])


def check_tokens_in(token_ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless all `token_ids` are in [0, vocab_size)."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        raise ValueError(f"token_ids must be in [0, {vocab_size}), got {token_ids[outside][0].item()}")


def shape_text(shape: Sequence[object]) -> str:
    """A shape as error messages show it."""
    return f"({', '.join(map(str, shape))})"
