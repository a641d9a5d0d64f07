"""The Triton counterparts of ``tile``: one pass over a tile's memory each, in its own dtype; arithmetic in float32.

Tiles are (N, W) with contiguous columns; rows may lie further apart. Tensors that are written in place are contiguous.
"""

# Triton's compiler evaluates the annotations of a kernel's parameters, and knows only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from troll.trust_region.kernels import launching_on
from troll.trust_region.kernels.tile import Outside, TileGradient, Transform
from troll.trust_region.support import BLOCK

#: Columns that a program holds at once: 16 bytes a thread and more, with so many warps.
FOLD_COLUMNS, FOLD_WARPS = 2048, 8
BLOCK_COLUMNS, BLOCK_WARPS = 1024, 4
GRADIENT_COLUMNS, GRADIENT_WARPS = 4096, 8


def fold_support(
    tile: Tensor, first: int, transform: Transform, token_ids: Tensor, on_support: Tensor, outside: Outside
) -> None:
    """As `tile.fold_support`."""
    scale, cap = _factors(transform)
    slots = token_ids.shape[-1]
    with launching_on(tile.device):
        _fold_support_kernel[(len(tile),)](
            tile,
            tile.stride(0),
            tile.shape[-1],
            first,
            scale,
            cap,
            token_ids.contiguous(),
            on_support,
            slots,
            *outside,
            SOFTCAP=transform.softcap is not None,
            ENTROPY=outside.weighted_sum is not None,
            SLOTS=triton.next_power_of_2(slots),
            COLUMNS=FOLD_COLUMNS,
            num_warps=FOLD_WARPS,
        )


def fold_blocks(
    tile: Tensor, first: int, width: int, transform: Transform, token_ids: Tensor, sampled_logit: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """As `tile.fold_blocks`; the tile stays raw, and is read again where logits are asked for."""
    scale, cap = _factors(transform)
    token_ids = token_ids.contiguous()
    rows, blocks = len(tile), tile.shape[-1] // BLOCK
    maxima, log_sums = (tile.new_empty((rows, blocks), dtype=torch.float32) for _ in range(2))
    with launching_on(tile.device):
        _fold_blocks_kernel[(rows, triton.cdiv(tile.shape[-1], BLOCK_COLUMNS))](
            tile,
            tile.stride(0),
            width,
            first,
            scale,
            cap,
            token_ids,
            sampled_logit,
            maxima,
            log_sums,
            blocks,
            SOFTCAP=transform.softcap is not None,
            BLOCK=BLOCK,
            BLOCKS=BLOCK_COLUMNS // BLOCK,
            num_warps=BLOCK_WARPS,
        )

    def logits_at(columns: Tensor) -> Tensor:
        columns = columns.contiguous()
        logits = columns.new_empty(columns.shape, dtype=torch.float32)
        with launching_on(tile.device):
            _gather_kernel[(rows, triton.cdiv(columns.shape[-1], BLOCK_COLUMNS))](
                tile,
                tile.stride(0),
                width,
                first,
                scale,
                cap,
                token_ids,
                columns,
                logits,
                columns.shape[-1],
                SOFTCAP=transform.softcap is not None,
                COLUMNS=BLOCK_COLUMNS,
                num_warps=BLOCK_WARPS,
            )
        return logits

    return logits_at, maxima, log_sums


def gradient(tile: Tensor, first: int, transform: Transform, token_ids: Tensor, of: TileGradient) -> Tensor:
    """As `tile.gradient`; in the tile's memory and dtype."""
    scale, cap = _factors(transform)
    slots = token_ids.shape[-1]
    through_entropy = of.entropy is not None and of.entropy_gradient is not None
    # Gradients of sums come expanded.
    of = TileGradient(*(None if x is None else x.contiguous() for x in of))  # type: ignore[arg-type]
    with launching_on(tile.device):
        _gradient_kernel[(len(tile), triton.cdiv(tile.shape[-1], GRADIENT_COLUMNS))](
            tile,
            tile.stride(0),
            tile.shape[-1],
            first,
            scale,
            cap,
            token_ids.contiguous(),
            slots,
            of.log_outside,
            of.outside,
            of.on_support,
            of.log_total,
            of.entropy if through_entropy else None,
            of.entropy_gradient if through_entropy else None,
            SOFTCAP=transform.softcap is not None,
            ENTROPY=through_entropy,
            SLOTS=triton.next_power_of_2(slots),
            COLUMNS=GRADIENT_COLUMNS,
            num_warps=GRADIENT_WARPS,
        )
    return tile


def _factors(transform: Transform) -> tuple[float, float]:
    """With a softcap, logits are ``cap · tanh(scale · product)``; without one, ``scale · product``."""
    if transform.softcap is None:
        return transform.logit_scale / transform.temperature, 1.0
    return transform.logit_scale / transform.softcap, transform.softcap / transform.temperature


@triton.jit
def _tanh(x):
    """Relative error below 3e-7; ``2 σ(2x) − 1`` would lose all of it near 0."""
    # From 9.01 on it is 1. Not tl.minimum, which drops NaN.
    size = tl.where(tl.abs(x) > 10.0, 10.0, tl.abs(x))
    square = size * size
    exp = tl.exp(2.0 * size)
    # Lambert's continued fraction, cut after 9: 1e-10 off at 0.5.
    near_zero = size < 0.5
    above = tl.where(near_zero, size * (945.0 + square * (105.0 + square)), exp - 1.0)
    below = tl.where(near_zero, 945.0 + square * (420.0 + 15.0 * square), exp + 1.0)
    return tl.where(x < 0.0, -above, above) / below


@triton.jit
def _logits(product, scale, cap, SOFTCAP: tl.constexpr):
    z = product.to(tl.float32) * scale
    if SOFTCAP:
        z = _tanh(z) * cap
    return z


@triton.jit
def _fold_support_kernel(
    tile,
    stride,
    width,
    first,
    scale,
    cap,
    token_ids,
    on_support,
    slots,
    maximum,
    exp_sum,
    weighted_sum,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile += row * stride

    slot = tl.arange(0, SLOTS)
    ids = tl.load(token_ids + row * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
    column = ids - first
    here = (ids >= 0) & (column >= 0) & (column < width)
    product = tl.load(tile + column, mask=here, other=0.0)
    tl.store(on_support + row * slots + slot, _logits(product, scale, cap, SOFTCAP), mask=here)
    # The support is marked as NaN, which no transform turns into anything else, and left out below. Several threads
    # may read one slot: none before all have read, and no column before all slots are marked.
    tl.debug_barrier()
    tl.store(tile + column, tl.full([SLOTS], float("nan"), tl.float32).to(tile.dtype.element_ty), mask=here)
    tl.debug_barrier()

    # One maximum for all lanes, so that an element costs one exponential; sums by lane, added up at the end.
    lane = tl.arange(0, COLUMNS)
    before = tl.load(maximum + row)
    m = before
    total = tl.where(lane == 0, tl.load(exp_sum + row), 0.0)
    weighted = tl.zeros([COLUMNS], tl.float32)
    if ENTROPY:
        weighted = tl.where(lane == 0, tl.load(weighted_sum + row), 0.0)
    marked = tl.zeros([COLUMNS], tl.int32)
    product = tl.load(tile + lane, mask=lane < width, other=0.0)
    for start in range(0, width, COLUMNS):
        inside = start + lane < width
        z = _logits(product, scale, cap, SOFTCAP)
        # On its way while these are folded: the reductions' barriers would keep it from starting.
        product = tl.load(tile + start + COLUMNS + lane, mask=start + COLUMNS + lane < width, other=0.0)
        is_nan = inside & (z != z)
        marked += is_nan.to(tl.int32)
        z = tl.where(inside & (z == z), z, float("-inf"))
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

    # More NaN than were marked: the row's own.
    broken = (tl.sum(marked, axis=0) > tl.sum(here.to(tl.int32), axis=0)) | (before != before)
    tl.store(maximum + row, tl.where(broken, float("nan"), m))
    tl.store(exp_sum + row, tl.sum(total, axis=0))
    if ENTROPY:
        tl.store(weighted_sum + row, tl.sum(weighted, axis=0))


@triton.jit
def _fold_blocks_kernel(
    tile,
    stride,
    width,
    first,
    scale,
    cap,
    token_ids,
    sampled_logit,
    maxima,
    log_sums,
    blocks,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile += row * stride
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]

    sampled = tl.load(token_ids + row).to(tl.int64) - first
    start = tl.program_id(1) * (BLOCKS * BLOCK)
    here = (sampled >= start) & (sampled < start + BLOCKS * BLOCK) & (sampled < width)
    product = tl.load(tile + sampled, mask=here, other=0.0)
    tl.store(sampled_logit + row, _logits(product, scale, cap, SOFTCAP), mask=here)

    inside = column < width
    z = _logits(tl.load(tile + column, mask=inside, other=0.0), scale, cap, SOFTCAP)
    z = tl.where(inside & (column != sampled), z, float("-inf"))
    # The maximum leaves NaN out everywhere, or would keep it on some machines only; the sum has it.
    maximum = tl.max(tl.where(z == z, z, float("-inf")), axis=1)
    center = tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)
    log_sum = tl.log(tl.sum(tl.exp(z - center[:, None]), axis=1)) + center
    maximum = tl.where(log_sum == log_sum, maximum, float("nan"))
    tl.store(maxima + row * blocks + block, maximum, mask=block < blocks)
    tl.store(log_sums + row * blocks + block, log_sum, mask=block < blocks)


@triton.jit
def _gather_kernel(
    tile,
    stride,
    width,
    first,
    scale,
    cap,
    token_ids,
    columns,
    logits,
    count,
    SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < count
    column = tl.load(columns + row * count + at, mask=inside, other=0)
    sampled = tl.load(token_ids + row).to(tl.int64) - first
    present = inside & (column < width) & (column != sampled)
    z = _logits(tl.load(tile + row * stride + column, mask=present, other=0.0), scale, cap, SOFTCAP)
    tl.store(logits + row * count + at, tl.where(present, z, float("-inf")), mask=inside)


@triton.jit
def _gradient_kernel(
    tile,
    stride,
    width,
    first,
    scale,
    cap,
    token_ids,
    slots,
    log_outside,
    outside,
    on_support,
    log_total,
    entropy,
    entropy_gradient,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile += row * stride
    start = tl.program_id(1) * COLUMNS
    at = start + tl.arange(0, COLUMNS)
    inside = at < width
    log_all = tl.load(log_total + row)
    broken = log_all != log_all

    z = tl.load(tile + at, mask=inside, other=0.0).to(tl.float32) * scale
    slope = scale
    if SOFTCAP:
        tanh = _tanh(z)
        z = tanh * cap
        slope = (1.0 - tanh * tanh) * (scale * cap)
    grad = tl.exp(z - tl.load(log_outside + row)) * tl.load(outside + row)
    if ENTROPY:
        log_p = z - log_all
        p = tl.exp(log_p)
        # −inf · 0 would be NaN.
        through_entropy = tl.where(p > 0.0, p * (log_p + tl.load(entropy + row)), 0.0)
        grad -= tl.load(entropy_gradient + row) * through_entropy
    grad = tl.where(broken, 0.0, grad * slope)
    tl.store(tile + at, grad.to(tile.dtype.element_ty), mask=inside)

    slot = tl.arange(0, SLOTS)
    ids = tl.load(token_ids + row * slots + slot, mask=slot < slots, other=-1).to(tl.int64)
    column = ids - first
    here = (ids >= 0) & (column >= start) & (column < start + COLUMNS) & (column < width)
    grad_here = tl.where(broken, 0.0, tl.load(on_support + row * slots + slot, mask=here, other=0.0))
    # Another thread wrote these columns just now.
    tl.debug_barrier()
    tl.store(tile + column, grad_here.to(tile.dtype.element_ty), mask=here)
