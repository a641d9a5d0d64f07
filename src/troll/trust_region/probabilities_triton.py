"""Shared by Triton programs that hold a token's K + 1 outcomes in registers: first the slots, then the tail."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import probabilities

LOG_FLOOR = tl.constexpr(probabilities.LOG_FLOOR)

#: Outcomes in a warp. A sum within one warp takes no barrier, but more than eight outcomes a thread take so many
#: registers that few tokens would be in flight, and 32 would not fit.
OUTCOMES_A_WARP = 256


def program_of(outcomes: int) -> dict[str, int]:
    """The size and the warps of a program for one token: two programs that add the same numbers get the same sum."""
    size = triton.next_power_of_2(outcomes)
    return {"OUTCOMES": size, "num_warps": min(max(size // OUTCOMES_A_WARP, 1), 16)}


@triton.jit
def floored(log_probs, present):
    """Computes `probabilities.floored`. Absent outcomes get any finite number; one NaN makes all outcomes NaN."""
    raised = tl.where(log_probs < LOG_FLOOR, LOG_FLOOR, log_probs)
    return raised - tl.log(tl.sum(tl.where(present, tl.exp(raised), 0.0)))


@triton.jit
def divergence_terms(p, q, x):
    """The terms of `probabilities.divergence`: `p (x eˣ − expm1 x)` for `q = p eˣ`, never negative.

    Triton has no expm1. Where x is small this is `p Σ xⁿ / (n (n − 2)!)` for n ≥ 2, exact to float32 with 11 terms;
    elsewhere `p + (x − 1) q` loses at most two bits.
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
def log_sum_exp(z):
    """The log-sum-exp of a vector: −inf if all entries are, NaN if one is NaN or +inf."""
    maximum = tl.max(z, axis=0)
    center = tl.where(maximum == float("-inf"), 0.0, maximum)
    return center + tl.log(tl.sum(tl.exp(z - center), axis=0))


@triton.jit
def log_add_exp(a, b):
    """The log-sum-exp of two numbers, with NaN and infinity as in `log_sum_exp`."""
    maximum = tl.maximum(a, b)
    center = tl.where(maximum == float("-inf"), 0.0, maximum)
    return center + tl.log(tl.exp(a - center) + tl.exp(b - center))


@triton.jit
def nan_unless_finite(x):
    """The number, or NaN if it is not finite: then everything that it normalises becomes NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def sortable(z):
    """Integers that order like float32 numbers; 0 and −0 are equal, and NaN is beyond all numbers of its sign."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
