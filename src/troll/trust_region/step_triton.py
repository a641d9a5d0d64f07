"""The Triton counterpart of `step`: one program for each token, forward and backward.

A program holds its token's K + 1 outcomes in registers, normalises and floors both policies, and finds the root. The
backward pass computes all of this again from the same logits, except for τ and its center, instead of keeping rows of
gradients.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .dual_triton import newton, tilt
from .kernels import launching_on
from .policy.on_support import PolicyOnSupport
from .policy.sparse import SparsePolicy
from .probabilities import as_float
from .probabilities_triton import (
    LOG_FLOOR,
    divergence_terms,
    floored,
    log_sum_exp,
    nan_unless_finite,
    program_of,
)
from .projection import broadcast_bound


def step(
    new: PolicyOnSupport, old: SparsePolicy, kl_bound: float | Tensor, *, proximal: bool
) -> tuple[Tensor | None, ...]:
    """`step.trust_region_step` of two policies on one support, by Newton's method in float32.

    Where a tensor of bounds is NaN or not above 0, the token's numbers are NaN.

    Returns:
        The fields of `TrustRegionStep` up to `entropy`, in its order, each (...).
    """
    shape, k = new.shape, new.token_ids.shape[-1]
    logits, tail_logit = as_float(new.logits), as_float(new.tail_logit)
    bound = broadcast_bound(kl_bound, shape, logits).reshape(-1)
    policies = (
        logits.reshape(-1, k).contiguous(),
        tail_logit.reshape(-1).contiguous(),
        None if new.tail_entropy is None else new.tail_entropy.reshape(-1).contiguous(),
        new.token_ids.reshape(-1, k).contiguous(),
        old.log_probs.detach().float().reshape(-1, k).contiguous(),
        old.tail_log_prob.detach().float().reshape(-1).contiguous(),
        old.slot.reshape(-1).contiguous(),
    )
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in policies[:3])
    outputs = _Step.apply(*policies, bound, proximal, wants_gradient)
    return tuple(None if x is None else x.view(shape) for x in outputs)


class _Step(torch.autograd.Function):
    """The fields of `TrustRegionStep` for N tokens."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        tail_logit: Tensor,
        tail_entropy: Tensor | None,
        ids: Tensor,
        old_log_probs: Tensor,
        old_tail: Tensor,
        slot: Tensor,
        bound: Tensor,
        proximal: bool,
        wants_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        tokens, k = logits.shape
        projected = torch.empty_like(tail_logit, dtype=torch.bool)
        step = (*(torch.empty_like(tail_logit) for _ in range(6)), projected)
        entropy = None if tail_entropy is None else torch.empty_like(tail_logit)
        tau, center = (torch.empty_like(tail_logit) if wants_gradient else None for _ in range(2))
        policies = (logits, tail_logit, tail_entropy, ids, old_log_probs, old_tail, slot)
        if tokens:
            with launching_on(logits.device):
                _step_kernel[(tokens,)](
                    *policies,
                    k,
                    *(bound, bound.stride(0)),
                    *step,
                    *(entropy, tau, center),
                    PROXIMAL=proximal,
                    **program_of(k + 1),
                )
        if wants_gradient:
            ctx.save_for_backward(*policies, projected, tau, center)  # type: ignore[arg-type]
            ctx.proximal = proximal  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(*step[3:])  # from `kl_before` on
        return *step, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, tail_logit, tail_entropy, *others = ctx.saved_tensors
        tokens, k = logits.shape
        upstream = (*grads[:3], None if tail_entropy is None else grads[7])
        grad_logits, grad_tail = torch.empty_like(logits), torch.empty_like(tail_logit)
        grad_entropy = None if upstream[3] is None else torch.empty_like(tail_logit)
        if tokens:
            with launching_on(logits.device):
                _step_gradient_kernel[(tokens,)](
                    *(logits, tail_logit, tail_entropy, *others[:4]),
                    k,
                    *others[4:],
                    *upstream,
                    # Gradients of sums come expanded.
                    *(0 if x is None else x.stride(0) for x in upstream),
                    *(grad_logits, grad_tail, grad_entropy),
                    PROXIMAL=ctx.proximal,
                    **program_of(k + 1),
                )
        return grad_logits, grad_tail, grad_entropy, *(None,) * 7


@triton.jit
def _step_kernel(
    logits,  # (N, k)
    tail_logit,  # (N,)
    tail_entropy,  # (N,) or None
    ids,  # (N, k), like the next parameter
    old_log_probs,
    old_tail,  # (N,), like the next parameter
    slot,
    k,
    bound,  # (N,)
    bound_stride,
    log_ratio,  # (N,), like all below; from `entropy` on, None where not wanted
    regression,
    log_prob,
    kl_before,
    kl_after,
    multiplier,
    projected,
    entropy,
    tau,
    center,
    PROXIMAL: tl.constexpr,
    OUTCOMES: tl.constexpr,
):
    """The trust region of one token: docs/method.md has the formulas, `dual` the numerics."""
    row = tl.program_id(0).to(tl.int64)
    sampled = tl.arange(0, OUTCOMES) == tl.load(slot + row)
    new_raw, log_new, log_old, present, old_raw = outcomes_of(
        logits, tail_logit, ids, old_log_probs, old_tail, row, k, OUTCOMES
    )
    p = tl.where(present, tl.exp(log_old), 0.0)
    p_new = tl.where(present, tl.exp(log_new), 0.0)
    s = tl.where(present, log_new - log_old, 0.0)
    sampled_s = s_of_sampled(new_raw, old_raw, sampled)

    limit = tl.load(bound + row * bound_stride)
    kl = tl.sum(divergence_terms(p, p_new, s))
    kl = tl.where(kl < 0, 0.0, kl)  # keeps NaN
    outside = kl > limit
    # Added to every result: NaN where the distributions or the bound are invalid.
    unless_broken = tl.where((kl == kl) & (limit > 0), 0.0, float("nan"))
    outside &= unless_broken == 0.0

    ratio, pull, kl_of_q, eta = sampled_s, 0.0, kl, 0.0
    root, around = unless_broken + 1.0, 0.0
    if outside:
        root, around = newton(p, s, limit)
        _, q, log_total, kl_of_q, mean, _ = tilt(p, s, root, around)
        ratio = root * (sampled_s - around) - log_total
        eta = (1 - root) / root
        if not PROXIMAL:
            # p̃ ∝ q e^{(1 − τ)(s − μ)}, so that its divergence from q is one more tilt: log p̃ − log q would cancel where
            # q is close to p̃.
            _, _, _, pull, _, _ = tilt(q, s - around - mean, 1 - root, 0.0)
    if PROXIMAL:
        pull = tl.sum(divergence_terms(p_new, p, -s))

    tl.store(log_ratio + row, ratio + unless_broken)
    tl.store(regression + row, pull + unless_broken)
    tl.store(log_prob + row, tl.sum(tl.where(sampled, new_raw, 0.0)) + unless_broken)
    tl.store(kl_before + row, kl + unless_broken)
    tl.store(kl_after + row, kl_of_q + unless_broken)
    tl.store(multiplier + row, eta + unless_broken)
    tl.store(projected + row, outside)
    if entropy is not None:
        in_tail = tl.load(tail_entropy + row)
        tl.store(entropy + row, tl.sum(entropy_terms(new_raw, in_tail, k, OUTCOMES)) + unless_broken)
    if tau is not None:
        tl.store(tau + row, root)
        tl.store(center + row, around)


@triton.jit
def _step_gradient_kernel(
    logits,  # as in `_step_kernel`
    tail_logit,
    tail_entropy,
    ids,
    old_log_probs,
    old_tail,
    slot,
    k,
    projected,  # (N,), like the next two parameters
    tau,
    center,
    log_ratio_grad,  # (N,), or None where nothing arrives, like the next three parameters
    regression_grad,
    log_prob_grad,
    entropy_grad,
    log_ratio_stride,
    regression_stride,
    log_prob_stride,
    entropy_stride,
    logits_grad,  # (N, k)
    tail_grad,  # (N,)
    tail_entropy_grad,  # (N,) or None
    PROXIMAL: tl.constexpr,
    OUTCOMES: tl.constexpr,
):
    """One token's gradient: first with respect to raw log-probabilities, then to logits."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, OUTCOMES)
    sampled = lane == tl.load(slot + row)
    new_raw, log_new, log_old, present, old_raw = outcomes_of(
        logits, tail_logit, ids, old_log_probs, old_tail, row, k, OUTCOMES
    )
    new = tl.where(present, tl.exp(log_new), 0.0)
    # No gradient flows through a floored entry.
    free = present & (new_raw >= LOG_FLOOR)
    outside, root = tl.load(projected + row), tl.load(tau + row)
    whole = root == root  # else the token is not a distribution, and has no gradient

    # The gradient of the log-ratio is τ at s_o, which is raw, and of A(τ) at the floored outcomes.
    pulled = tl.zeros([OUTCOMES], tl.float32)
    from_tilt = tl.zeros([OUTCOMES], tl.float32)
    if outside:
        p = tl.where(present, tl.exp(log_old), 0.0)
        s = tl.where(present, log_new - log_old, 0.0)
        around = tl.load(center + row)
        _, q, _, _, mean, variance = tilt(p, s, root, around)
        # s − μ without rounding s − center a second time.
        deviation = s - around - mean
        along = (s_of_sampled(new_raw, old_raw, sampled) - around - mean) / variance
        # With σ² = 0, nothing moves on the surface of the ball.
        along = tl.where(tl.abs(along) < float("inf"), along, 0.0)
        from_tilt = -q * (1 + along * deviation)
        if not PROXIMAL:
            x, _, _, divergence, _, _ = tilt(q, deviation, 1 - root, 0.0)
            pulled = tl.where(free, new * (x - divergence), 0.0)
    if PROXIMAL:
        pulled = tl.where(free, tl.where(whole, new - tl.exp(log_old), 0.0), 0.0)
    # From s_o, and from the sum of the floored probabilities, which normalises all of them.
    through_ratio = tl.where(sampled & (old_raw > float("-inf")), root, 0.0)
    if outside:
        through_ratio += tl.where(free, root * (new + from_tilt), 0.0)

    grad = tl.zeros([OUTCOMES], tl.float32)
    # The gradient at an output that does not depend on an outcome does not matter, NaN included.
    if log_ratio_grad is not None:
        through_ratio = tl.where(whole, through_ratio, 0.0)
        upstream = tl.load(log_ratio_grad + row * log_ratio_stride)
        grad += tl.where(through_ratio != 0, through_ratio * upstream, 0.0)
    if regression_grad is not None:
        grad += tl.where(pulled != 0, pulled * tl.load(regression_grad + row * regression_stride), 0.0)
    if log_prob_grad is not None:
        upstream = tl.load(log_prob_grad + row * log_prob_stride)
        grad += tl.where(sampled, tl.where(whole, upstream, 0.0), 0.0)
    probs = tl.where(whole, tl.exp(new_raw), 0.0)
    grad -= probs * tl.sum(grad)
    if entropy_grad is not None:
        in_tail = tl.load(tail_entropy + row)
        terms = tl.where(whole, entropy_terms(new_raw, in_tail, k, OUTCOMES), 0.0)
        through_entropy = terms - probs * tl.sum(terms)
        upstream = tl.load(entropy_grad + row * entropy_stride)
        grad += tl.where(through_entropy != 0, through_entropy * upstream, 0.0)
        at_tail = tl.where(probs > 0, probs * upstream, 0.0)
        tl.store(tail_entropy_grad + row + lane - k, at_tail, mask=lane == k)
    tl.store(logits_grad + row * k + lane, grad, mask=lane < k)
    tl.store(tail_grad + row + lane - k, grad, mask=lane == k)


@triton.jit
def outcomes_of(logits, tail_logit, ids, old_log_probs, old_tail, row, k, OUTCOMES: tl.constexpr):
    """Both policies on the slots, and on the tail in lane k.

    Returns:
        Raw log p̃; log p̃ and log p, floored and renormalised; which outcomes are present; and raw log p.
    """
    lane = tl.arange(0, OUTCOMES)
    inside, is_tail = lane < k, lane == k
    z = tl.load(logits + row * k + lane, mask=inside, other=float("-inf"))
    z = tl.where(is_tail, tl.load(tail_logit + row), z)
    new_raw = z - nan_unless_finite(log_sum_exp(z))
    old_raw = tl.load(old_log_probs + row * k + lane, mask=inside, other=float("-inf"))
    old_raw = tl.where(is_tail, tl.load(old_tail + row), old_raw)
    present = tl.load(ids + row * k + lane, mask=inside, other=-1) >= 0
    present |= is_tail & ((new_raw > float("-inf")) | (old_raw > float("-inf")))
    return new_raw, floored(new_raw, present), floored(old_raw, present), present, old_raw


@triton.jit
def s_of_sampled(new_raw, old_raw, sampled):
    """`log p̃ − log p` of the sampled token, raw."""
    # A token that the old policy excludes cannot have been sampled from it. Its s is 0, so its ratio is finite.
    s = tl.where(old_raw == float("-inf"), 0.0, new_raw - old_raw)
    return tl.sum(tl.where(sampled, s, 0.0))


@triton.jit
def entropy_terms(raw, in_tail, k, OUTCOMES: tl.constexpr):
    """−p log p of each slot; for the tail, with the entropy within it; 0 without mass."""
    probs = tl.exp(raw)
    surprise = tl.where(tl.arange(0, OUTCOMES) == k, in_tail - raw, -raw)
    return tl.where(probs > 0, probs * surprise, 0.0)
