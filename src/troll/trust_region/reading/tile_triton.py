"""Shared by the kernels over a tile: where its rows are, and how its numbers become logits."""

# Triton's compiler evaluates the annotations of a kernel's parameters, and knows only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from troll.trust_region.reading.fold import Tile, Transform

#: The widest loads may begin at multiples of this many elements, in any dtype.
WIDEST = 16


def memory_of(tile: Tile) -> tuple[Any, ...]:
    """The arguments of a kernel that say where a tile's rows are: see `row_of`."""
    values = tile.values
    if tile.offsets is None:
        return values, None, values.stride(0)
    return values, tile.offsets, 0


def alignment(tile: Tile) -> int:
    """The largest divisor of `WIDEST` that divides all `offsets`, which are sums of multiples of the values' strides.

    Without it the compiler would load element by element. It finds out by itself what the strides are divisible by.
    """
    shape, strides = tile.values.shape[:-1], tile.values.stride()[:-1]
    return math.gcd(WIDEST, *(stride for size, stride in zip(shape, strides, strict=True) if size > 1))


def factors(transform: Transform) -> tuple[float, float]:
    """`scale` and `cap` of `logits_of`: `cap · tanh(scale · x)` with a softcap, `scale · x` without."""
    if transform.softcap is None:
        return transform.scale / transform.temperature, 1.0
    return transform.scale / transform.softcap, transform.softcap / transform.temperature


@triton.jit
def row_of(values, offsets, stride, row, ALIGNMENT: tl.constexpr):
    """Where a row begins, in elements: from `offsets`, or `stride` apart if that is None."""
    if offsets is None:
        start = row * stride
    else:
        start = tl.multiple_of(tl.load(offsets + row), ALIGNMENT)
    return values + start


@triton.jit
def logits_of(x, scale, cap, SOFTCAP: tl.constexpr):
    """The source's numbers as logits, in float32; `scale` and `cap` are from `factors`."""
    z = x.to(tl.float32) * scale
    if SOFTCAP:
        z = tanh(z) * cap
    return z


@triton.jit
def tanh(x):
    """Tanh with a relative error below 3e-7; `2 σ(2x) − 1` would lose all precision near 0."""
    # From 9.01 on it is 1. Not tl.minimum, which drops NaN.
    size = tl.where(tl.abs(x) > 10.0, 10.0, tl.abs(x))
    square = size * size
    exp = tl.exp(2.0 * size)
    # Lambert's continued fraction, cut after 9: 1e-10 off at 0.5.
    near_zero = size < 0.5
    above = tl.where(near_zero, size * (945.0 + square * (105.0 + square)), exp - 1.0)
    below = tl.where(near_zero, 945.0 + square * (420.0 + 15.0 * square), exp + 1.0)
    return tl.where(x < 0.0, -above, above) / below
