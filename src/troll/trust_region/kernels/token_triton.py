"""One Triton program per token for what :mod:`~troll.trust_region.kernels.token` computes, gradients included.

A program holds its token's outcomes in registers: it floors both policies, finds the root, and writes the scalars and,
for each differentiable output, a row with its gradient with respect to the new policy. The backward pass is a weighted
sum of these rows.
"""

# Triton's compiler evaluates the annotations of a kernel's parameters, and knows only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from troll.trust_region import dual, support
from troll.trust_region.kernels import launching_on
from troll.trust_region.kernels.token import TrustRegionStep
from troll.trust_region.projection import broadcast_bound

LOG_FLOOR = tl.constexpr(math.log(support.PROBABILITY_FLOOR))
TOLERANCE = tl.constexpr(dual.tolerance(torch.float32))
MAX_EVALUATIONS = tl.constexpr(dual.MAX_EVALUATIONS)


def trust_region_step(
    new: Tensor, old: Tensor, present: Tensor, slot: Tensor, kl_bound: float | Tensor
) -> TrustRegionStep:
    """:func:`troll.trust_region.kernels.token.trust_region_step` by Newton's method, in float32."""
    new, old = support.as_float(new), old.detach().float()
    bound = broadcast_bound(kl_bound, slot.shape, new).reshape(-1)
    rows = (x.reshape(-1, x.shape[-1]).contiguous() for x in (new, old, present))
    wants_gradient = torch.is_grad_enabled() and new.requires_grad
    step = _TokenStep.apply(*rows, slot.reshape(-1).contiguous(), bound, wants_gradient)
    return TrustRegionStep(*(output.view(slot.shape) for output in step))


class _TokenStep(torch.autograd.Function):
    """The per-token fields of TrustRegionStep for N tokens, from (N, M) float32 log-probabilities."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, new: Tensor, old: Tensor, present: Tensor, slot: Tensor, bound: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, ...]:
        tokens, outcomes = new.shape
        dtypes = [new.dtype] * 6 + [torch.bool]
        step = tuple(torch.empty(tokens, dtype=dtype, device=new.device) for dtype in dtypes)
        # Without gradient, any pointer will do.
        through_q, through_regression = new.new_empty(2, tokens, outcomes) if wants_gradient else (new, new)
        if tokens:
            with launching_on(new.device):
                _step_kernel[(tokens,)](
                    *(new, old, present, slot, bound, bound.stride(0), outcomes),
                    *step,
                    *(through_q, through_regression),
                    WANTS_GRADIENT=wants_gradient,
                    **_launch(outcomes),
                )
        if wants_gradient:
            ctx.save_for_backward(through_q, through_regression, slot)
        ctx.mark_non_differentiable(*step[3:])  # all but log_probs, new_log_probs and regression
        return step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_probs: Tensor, new_log_probs: Tensor, regression: Tensor, *_: Tensor) -> Any:
        through_q, through_regression, slot = ctx.saved_tensors
        grad = torch.empty_like(through_q)
        tokens, outcomes = grad.shape
        upstream = (x.contiguous() for x in (log_probs, new_log_probs, regression))
        if tokens:
            with launching_on(grad.device):
                _gradient_kernel[(tokens,)](
                    *(through_q, through_regression, slot), *upstream, *(grad, outcomes), **_launch(outcomes)
                )
        return grad, None, None, None, None, None


def _launch(outcomes: int) -> dict[str, int]:
    # Within one warp a sum takes no barrier. More than eight outcomes a thread need so many registers (191 for sixteen,
    # on an H100) that few tokens would be in flight; 32 would spill.
    block = triton.next_power_of_2(outcomes)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@triton.jit
def _step_kernel(
    new_ptr,  # (N, outcomes), and the two after it
    old_ptr,
    present_ptr,
    slot_ptr,  # (N,), and all below up to the gradients
    bound_ptr,
    bound_stride,
    outcomes,
    log_prob_ptr,
    new_log_prob_ptr,
    regression_ptr,
    kl_before_ptr,
    kl_after_ptr,
    multiplier_ptr,
    projected_ptr,
    through_q_ptr,  # (N, outcomes): the gradient of log_prob, and of regression
    through_regression_ptr,
    WANTS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The trust region of one token: docs/method.md has the formulas, `dual` the numerics."""
    token = tl.program_id(0).to(tl.int64)
    outcome = tl.arange(0, BLOCK)
    at = token * outcomes + outcome
    inside = outcome < outcomes
    present = (tl.load(present_ptr + at, mask=inside, other=0) != 0) & inside
    raw = tl.load(new_ptr + at, mask=present, other=0.0)
    slot = tl.load(slot_ptr + token)
    bound = tl.load(bound_ptr + token * bound_stride)
    new_log_prob = tl.load(new_ptr + token * outcomes + slot)
    sampled = outcome == slot

    log_new = floored(raw, present)
    log_old = floored(tl.load(old_ptr + at, mask=present, other=0.0), present)
    p = tl.where(present, tl.exp(log_old), 0.0)
    s = tl.where(present, log_new - log_old, 0.0)

    kl_before = tl.sum(divergence_terms(p, tl.where(present, tl.exp(log_new), 0.0), s))
    kl_before = tl.where(kl_before < 0, 0.0, kl_before)  # keeps NaN
    projected = kl_before > bound
    broken = kl_before != kl_before

    log_prob = tl.where(broken, kl_before, new_log_prob)
    regression = tl.where(broken, kl_before, 0.0)
    kl_after = kl_before
    multiplier = 0.0
    through_q = tl.where(sampled & (broken == 0), 1.0, 0.0)
    through_regression = tl.zeros([BLOCK], tl.float32)

    if projected:
        tau, center = newton(p, s, bound)
        x, q, kl_after, mean, variance = tilt(p, s, tau, center)
        log_prob = tl.sum(tl.where(sampled, log_old + x, 0.0))
        multiplier = (1 - tau) / tau

        # s − μ without rounding s − center a second time. And p̃ ∝ q e^{(1 − τ)(s − μ)}, so that its divergence from q
        # is one more tilt: log p̃ − log q would cancel where q is close to p̃.
        deviation = s - center - mean
        x, new, regression, _, _ = tilt(q, deviation, 1 - tau, 0.0)
        if WANTS_GRADIENT:
            free = present & (raw >= LOG_FLOOR)
            along = tl.sum(tl.where(sampled, deviation, 0.0)) / variance
            # σ² = 0 is a ball on whose surface nothing moves.
            along = tl.where(tl.abs(along) < float("inf"), along, 0.0)
            through_q = tl.where(sampled, 1.0, 0.0) - q * (1 + along * deviation)
            through_q = tl.where(free, tau * through_q, 0.0)
            through_regression = tl.where(free, new * (x - regression), 0.0)

    tl.store(log_prob_ptr + token, log_prob)
    tl.store(new_log_prob_ptr + token, new_log_prob)
    tl.store(regression_ptr + token, regression)
    tl.store(kl_before_ptr + token, kl_before)
    tl.store(kl_after_ptr + token, kl_after)
    tl.store(multiplier_ptr + token, multiplier)
    tl.store(projected_ptr + token, projected)
    if WANTS_GRADIENT:
        tl.store(through_q_ptr + at, through_q, mask=inside)
        tl.store(through_regression_ptr + at, through_regression, mask=inside)


@triton.jit
def _gradient_kernel(
    through_q_ptr,  # (N, outcomes), and the one after it
    through_regression_ptr,
    slot_ptr,  # (N,), and the three after it
    log_prob_grad_ptr,
    new_log_prob_grad_ptr,
    regression_grad_ptr,
    grad_ptr,  # (N, outcomes)
    outcomes,
    BLOCK: tl.constexpr,
):
    """One token's gradient with respect to the raw log-probabilities of the new policy."""
    token = tl.program_id(0).to(tl.int64)
    outcome = tl.arange(0, BLOCK)
    at = token * outcomes + outcome
    inside = outcome < outcomes
    through_q = tl.load(through_q_ptr + at, mask=inside, other=0.0)
    through_regression = tl.load(through_regression_ptr + at, mask=inside, other=0.0)
    # What arrives at an output that does not depend on an outcome does not matter, NaN included.
    grad = through_q * tl.where(through_q != 0, tl.load(log_prob_grad_ptr + token), 0.0)
    grad += through_regression * tl.where(through_regression != 0, tl.load(regression_grad_ptr + token), 0.0)
    grad += tl.where(outcome == tl.load(slot_ptr + token), tl.load(new_log_prob_grad_ptr + token), 0.0)
    tl.store(grad_ptr + at, grad, mask=inside)


@triton.jit
def newton(p, s, bound):
    """`dual.newton` for one token: τ, and the center around which the last evaluation was made more precise."""
    _, _, kl, center, variance = tilt(p, s, 1.0, 0.0)
    tau = first_guess(p, s, bound, kl, variance)
    lower, upper = tau * 0, tau * 0 + 1
    previous = upper * float("inf")
    evaluations = 0
    going = upper > 0
    while going:
        _, _, kl, mean, variance = tilt(p, s, tau, center)
        gap = tl.log(kl / bound)
        lower = tl.where(gap < 0, tau, lower)
        upper = tl.where(gap > 0, tau, upper)

        slope = tau * variance / kl
        step = tl.where(gap < 0, tau - gap / slope, tau * tl.exp(-gap / (tau * slope)))
        # Not `step <= lower`: a step that is NaN is not safe either.
        safe = (step > lower) & (step < upper) & (tl.abs(gap) <= 0.5 * previous)
        step = tl.where(safe, step, 0.5 * (lower + upper))
        previous = tl.abs(gap)

        # At float resolution the bracket cannot shrink further: its lower end is the feasible one.
        evaluations += 1
        exhausted = (step <= lower) | (step >= upper) | (evaluations >= MAX_EVALUATIONS)
        converged = tl.abs(gap) <= TOLERANCE
        going = (converged | exhausted) == 0
        tau = tl.where(going, step, tl.where(exhausted & (gap > 0), lower, tau))
        center += mean
    return tau, center


@triton.jit
def first_guess(p, s, bound, kl_at_one, variance_at_one):
    """The median of three estimates, see `dual._first_guess`."""
    mean = tl.sum(p * s)
    from_zero = tl.sqrt(2 * bound / tl.sum(p * (s - mean) * (s - mean)))
    from_zero = tl.where(from_zero > 1, 1.0, from_zero)
    from_one = tl.exp(tl.log(bound / kl_at_one) * kl_at_one / variance_at_one)
    through_one = tl.sqrt(bound / kl_at_one)
    from_zero = tl.where(from_zero == from_zero, from_zero, 0.5)
    from_one = tl.where(from_one == from_one, from_one, 0.5)
    through_one = tl.where(through_one == through_one, through_one, 0.5)
    low, high = tl.minimum(from_zero, from_one), tl.maximum(from_zero, from_one)
    return tl.maximum(low, tl.minimum(high, through_one))


@triton.jit
def tilt(p, s, tau, center):
    """`dual.tilt` of p, 0 on absent outcomes, to r ∝ p e^{τ s}.

    Returns ``log r − log p``, r, KL(r ‖ p), ``E_r[s] − center`` and ``Var_r[s]``. The floor keeps |s| below 28, and
    with it the exponentials within the range of float32, so that no maximum has to be taken off.
    """
    centered = s - center
    weight = p * tl.exp(tau * centered)
    total = tl.sum(weight)
    tilted = weight / total
    log_ratio = tau * centered - tl.log(total)
    kl = tl.sum(divergence_terms(p, tilted, log_ratio))
    mean = tl.sum(tilted * centered)
    deviation = centered - mean
    return log_ratio, tilted, kl, mean, tl.sum(tilted * deviation * deviation)


@triton.jit
def divergence_terms(p, q, x):
    """``p (x eˣ − expm1 x)`` for ``q = p eˣ``, which sum to KL(q ‖ p): never negative, and nothing cancels.

    Triton has no expm1. Where x is small this is ``p Σ xⁿ / (n (n − 2)!)`` for n ≥ 2, exact to float32 with 11 terms;
    elsewhere ``p + (x − 1) q`` loses at most two bits.
    """
    series = 1.0 / 3991680 + x * (1.0 / 43545600)
    series = 1.0 / 403200 + x * series
    series = 1.0 / 45360 + x * series
    series = 1.0 / 5760 + x * series
    series = 1.0 / 840 + x * series
    series = 1.0 / 144 + x * series
    series = 1.0 / 30 + x * series
    series = 1.0 / 8 + x * series
    series = 1.0 / 3 + x * series
    series = 1.0 / 2 + x * series
    return tl.where(tl.abs(x) < 1, p * (x * x * series), p + (x - 1) * q)


@triton.jit
def floored(log_probs, present):
    """`support.floored` of log-probabilities; absent outcomes are left at any finite number. NaN spreads to all."""
    raised = tl.where(log_probs < LOG_FLOOR, LOG_FLOOR, log_probs)
    return raised - tl.log(tl.sum(tl.where(present, tl.exp(raised), 0.0)))
