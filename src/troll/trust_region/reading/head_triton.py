"""The kernel that multiplies hidden states with single rows of a head's weight."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products_kernel(
    hidden,
    hidden_stride,
    hidden_column_stride,
    weight,
    weight_stride,
    weight_column_stride,
    bias,
    bias_stride,
    ids,  # (N, slots)
    slots,
    first,
    entries,
    products,  # (N, slots)
    width,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The products of one token with some of its entries."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    token = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    used = (token >= first) & (token < first + entries)
    token = tl.where(used, token - first, -1)
    hidden += row * hidden_stride
    lane = tl.arange(0, COLUMNS)
    total = tl.zeros([SLOTS, COLUMNS], tl.float32)
    # Without a used slot there is nothing to add up.
    end = tl.where(tl.max(token, axis=0) >= 0, width, 0)
    for start in range(0, end, COLUMNS):
        column = (start + lane).to(tl.int64)
        inside = column < width
        h = tl.load(hidden + column * hidden_column_stride, mask=inside, other=0.0)
        w = tl.load(
            weight + token[:, None] * weight_stride + column[None, :] * weight_column_stride,
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )
        # Operands in the tiles' precision, so that these products equal the tiles' except for the result's rounding.
        total += h.to(tl.float32)[None, :] * w.to(hidden.dtype.element_ty).to(tl.float32)
    product = tl.sum(total, axis=1)
    if bias is not None:
        product += tl.load(bias + token * bias_stride, mask=used, other=0.0).to(tl.float32)
    tl.store(products + row * slots + slot, tl.where(used, product, float("-inf")), mask=slot < slots)
