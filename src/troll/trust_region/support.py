"""Reading a support from logits: its tokens, their log-probabilities, and the mass of all others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

#: Smaller probabilities are raised to this before a projection, and the distribution renormalised.
PROBABILITY_FLOOR = 1e-12


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
    total = torch.logsumexp(z, dim=-1, keepdim=True)
    return total.masked_fill(~total.isfinite(), torch.nan)


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
