"""Shared by the kernels over a tile: where its rows are, and how its numbers become logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import TensorRows, Transform

#: The widest loads may begin at multiples of this many elements, in any dtype.
WIDEST = 16


class Memory(NamedTuple):
    """Where the rows of a tile are: numbers of a source in their own dtype, of which only a gradient is written."""

    values: Tensor
    """(n, W) with contiguous columns; or, with `offsets`, any tensor."""
    width: int
    """W, the number of columns."""
    offsets: Tensor | None = None
    """(n,) int64: where each row begins in the memory of `values`, in elements; multiples of its strides."""

    @property
    def place(self) -> tuple[Tensor, Tensor | None, int]:
        """A kernel's `values`, `offsets` and `stride`, for `row_of`."""
        return self.values, self.offsets, self.values.stride(0) if self.offsets is None else 0

    def arguments(self, transform: Transform) -> tuple[Any, ...]:
        """A kernel's `place`, `width`, `scale` and `cap`, the last two for `logits_of`."""
        scale, cap = transform.scale / transform.temperature, 1.0
        if transform.softcap is not None:
            scale, cap = transform.scale / transform.softcap, transform.softcap / transform.temperature
        return *self.place, self.width, scale, cap

    def constants(self, transform: Transform) -> dict[str, Any]:
        """A kernel's `SOFTCAP`, and the `ALIGNMENT` of its rows."""
        return {"SOFTCAP": transform.softcap is not None, "ALIGNMENT": self.alignment}

    @property
    def alignment(self) -> int:
        """The largest divisor of `WIDEST` that divides all `offsets`, which are sums of multiples of the strides.

        Without it the compiler would load element by element, since it knows the divisors of strides but not of
        offsets.
        """
        shape, strides = self.values.shape[:-1], self.values.stride()[:-1]
        return math.gcd(WIDEST, *(stride for size, stride in zip(shape, strides, strict=True) if size > 1))

    @classmethod
    def of(cls, tensor: TensorRows, rows: slice) -> Memory:
        """Some rows of a tensor, where they are."""
        values, row_index = tensor
        width = values.shape[-1]
        if row_index is not None:
            return cls(values, width, row_index[rows] * values.stride(0))
        if values.dim() == 2:
            return cls(values[rows], width)
        first, *others = (
            torch.arange(0, size * stride, stride, device=values.device)
            if stride
            else torch.zeros(size, dtype=torch.int64, device=values.device)
            for size, stride in zip(values.shape[:-1], values.stride(), strict=False)
        )
        for offsets in others:
            first = first.unsqueeze(-1) + offsets
        return cls(values, width, first.flatten()[rows])


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
    """The source's numbers as logits, in float32: `cap · tanh(scale · x)` with a softcap, `scale · x` without."""
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
