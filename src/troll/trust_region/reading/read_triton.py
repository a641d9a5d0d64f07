"""The kernels of a reading: one pass over a tile for the numbers of its tokens, and one for its gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .memory_triton import logits_of, row_of, tanh

_NO_TOKEN = tl.constexpr(tiles.NO_TOKEN)


@triton.jit
def read_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    first,
    ids,  # (n, slots), like the next parameter
    ascending,
    slots,
    logits,  # (n, slots)
    maximum,  # (n,), like the next two parameters
    exp_sum,
    weighted_sum,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A support's logits of one row, and the sums over all others."""
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)

    slot = tl.arange(0, SLOTS)
    token = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    at = token - first
    here = (token >= 0) & (at >= 0) & (at < width)
    on_support = logits_of(tl.load(tile + at, mask=here, other=0.0), scale, cap, SOFTCAP)
    tl.store(logits + row * slots + slot, on_support, mask=here)

    # The loop below leaves the support out when it comes to its columns, which ascend.
    next_slot = tl.sum(((token >= 0) & (at < 0)).to(tl.int32))
    ascending += row * slots
    left_out = tl.load(ascending + next_slot, mask=next_slot < slots, other=_NO_TOKEN) - first

    # One maximum for all lanes, so that an element costs one exponential; sums by lane, added up at the end.
    lane = tl.arange(0, COLUMNS)
    m = tl.load(maximum + row)
    total = tl.where(lane == 0, tl.load(exp_sum + row), 0.0)
    weighted = tl.zeros([COLUMNS], tl.float32)
    if ENTROPY:
        weighted = tl.where(lane == 0, tl.load(weighted_sum + row), 0.0)
    x = tl.load(tile + lane, mask=lane < width, other=float("-inf"))
    for start in range(0, width, COLUMNS):
        column = start + lane
        z = logits_of(x, scale, cap, SOFTCAP)
        if SOFTCAP:  # a softcap makes −inf finite
            z = tl.where(column < width, z, float("-inf"))
        # Loaded while these are folded: the reductions' barriers would keep the load from starting.
        x = tl.load(tile + column + COLUMNS, mask=column + COLUMNS < width, other=float("-inf"))
        while left_out < start + COLUMNS:
            z = tl.where(column == left_out, float("-inf"), z)
            next_slot += 1
            left_out = tl.load(ascending + next_slot, mask=next_slot < slots, other=_NO_TOKEN) - first

        # A maximum may drop NaN, but the sums keep it.
        maximum_now = tl.maximum(m, tl.max(z, axis=0))
        center = tl.where(maximum_now == float("-inf"), 0.0, maximum_now)
        rescale = tl.exp(m - center)
        z -= center
        exp = tl.exp(z)
        if ENTROPY:
            moved = tl.where(rescale > 0.0, m - center, 0.0)
            # −inf · 0 would be NaN.
            weighted = rescale * (weighted + total * moved) + tl.where(exp > 0.0, exp * z, 0.0)
        total = rescale * total + exp
        m = maximum_now

    all_lanes = tl.sum(total, axis=0)
    tl.store(maximum + row, tl.where(all_lanes == all_lanes, m, float("nan")))
    tl.store(exp_sum + row, all_lanes)
    if ENTROPY:
        tl.store(weighted_sum + row, tl.sum(weighted, axis=0))


@triton.jit
def gradient_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    out_values,
    out_offsets,
    out_stride,
    first,
    ids,  # (n, slots)
    slots,
    log_outside,  # (n,)
    outside,  # (n,)
    on_support,  # (n, slots)
    tail_entropy,  # (n,), like the next parameter
    tail_entropy_gradient,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    OUT_ALIGNMENT: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of some columns of one row, see `tiles.Upstream`."""
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    out = row_of(out_values, out_offsets, out_stride, row, OUT_ALIGNMENT)
    start = tl.program_id(1) * COLUMNS
    at = start + tl.arange(0, COLUMNS)
    inside = at < width
    log_sum = tl.load(log_outside + row)
    broken = log_sum != log_sum

    z = tl.load(tile + at, mask=inside, other=0.0).to(tl.float32) * scale
    slope = scale
    if SOFTCAP:
        saturated = tanh(z)
        z = saturated * cap
        slope = (1.0 - saturated * saturated) * (scale * cap)
    log_w = z - log_sum
    w = tl.exp(log_w)
    grad = w * tl.load(outside + row)
    if ENTROPY:
        surprise = (log_w + tl.load(tail_entropy + row)) * tl.load(tail_entropy_gradient + row)
        grad -= tl.where(w > 0.0, w * surprise, 0.0)  # −inf · 0 would be NaN
    grad = tl.where(broken, 0.0, grad * slope)
    tl.store(out + at, grad.to(out_values.dtype.element_ty), mask=inside)

    slot = tl.arange(0, SLOTS)
    token = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    column = token - first
    here = (token >= 0) & (column >= start) & (column < start + COLUMNS) & (column < width)
    grad_here = tl.where(broken, 0.0, tl.load(on_support + row * slots + slot, mask=here, other=0.0))
    # Another thread wrote these columns just now.
    tl.debug_barrier()
    tl.store(out + column, grad_here.to(out_values.dtype.element_ty), mask=here)


@triton.jit
def clear_kernel(values, stride, width, rows, COLUMNS: tl.constexpr):
    """Zeros, in some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.where(tl.load(rows + row) != 0, width, 0)
    tl.store(values + row * stride + at, tl.zeros([COLUMNS], values.dtype.element_ty), mask=at < end)
