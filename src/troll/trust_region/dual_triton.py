"""The Triton counterpart of `dual`: the root of one token, whose outcomes a program holds in registers.

p is 0 on absent outcomes, and s any finite number there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import dual
from .probabilities_triton import divergence_terms

TOLERANCE = tl.constexpr(dual.tolerance(torch.float32))
MAX_EVALUATIONS = tl.constexpr(dual.MAX_EVALUATIONS)


@triton.jit
def newton(p, s, bound):
    """`dual.newton` for one token: τ, and the center of the last evaluation, near which rounding is least."""
    _, _, _, kl, center, variance = tilt(p, s, 1.0, 0.0)
    tau = first_guess(p, s, bound, kl, variance)
    lower, upper = tau * 0, tau * 0 + 1
    previous = upper * float("inf")
    evaluations = 0
    going = upper > 0
    while going:
        _, _, _, kl, mean, variance = tilt(p, s, tau, center)
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

    The floor keeps |s| below 28, and the exponentials within the range of float32: no maximum has to be subtracted.

    Returns:
        `log r − log p`, r, `log Σ p e^{τ (s − center)}`, KL(r ‖ p), `E_r[s] − center` and `Var_r[s]`.
    """
    centered = s - center
    weight = p * tl.exp(tau * centered)
    total = tl.sum(weight)
    tilted = weight / total
    log_total = tl.log(total)
    log_ratio = tau * centered - log_total
    kl = tl.sum(divergence_terms(p, tilted, log_ratio))
    mean = tl.sum(tilted * centered)
    deviation = centered - mean
    return log_ratio, tilted, log_total, kl, mean, tl.sum(tilted * deviation * deviation)
