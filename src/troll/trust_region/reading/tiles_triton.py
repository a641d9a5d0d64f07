"""The Triton counterpart of `tiles`: each kernel reads a tile's memory once, in its own dtype, and computes in float32.

A tile is the source's numbers where they are, and logits are computed in registers. Only a gradient is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import launching_on
from . import select_triton, tiles
from .launch_triton import grid_of, launcher
from .memory_triton import Memory, logits_of, row_of, tanh
from .tiles import Support, TailSums, TensorRows, Tile, Transform, Upstream

_NO_TOKEN = tl.constexpr(tiles.NO_TOKEN)

#: Slots in a program that multiplies single entries of a head: their products hide each other's latency.
MULTIPLIED = 16

#: Columns of a program that writes zeros.
CLEARED = 4096


class TritonTile(Tile):
    """A tile by Triton.

    Args:
        memory: The source's numbers for n tokens, (n, W).
        transform: Maps them to logits.
        first: The vocabulary entry of the first column.
        rows: Which of the N tokens they are.
        columns: Which of the entries that this process holds.
    """

    copies = False

    def __init__(self, memory: Memory, transform: Transform, first: int, rows: slice, columns: slice) -> None:
        self.memory, self.transform = memory, transform
        self.first, self.rows, self.columns = first, rows, columns

    @staticmethod
    def gathered_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, first: int) -> Tensor:
        """See the parent: a program gathers the weights that it multiplies."""
        rows, slots = ids.shape
        products = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        if not products.numel():
            return products
        with launching_on(ids.device):
            launcher(_products_kernel, (rows, triton.cdiv(slots, MULTIPLIED)), rows, hidden.shape[1], weight)(
                hidden,
                *hidden.stride(),
                weight,
                *weight.stride(),
                bias,
                0 if bias is None else bias.stride(0),
                ids.contiguous(),
                slots,
                first,
                len(weight),
                products,
                hidden.shape[1],
                SLOTS=MULTIPLIED,
            )
        return products

    @staticmethod
    def clear(values: Tensor, rows: Tensor) -> None:
        """See the parent; other rows are not read."""
        grid = (len(rows), triton.cdiv(values.shape[-1], CLEARED))
        if len(rows):
            with launching_on(values.device):
                _clear_kernel[grid](values, values.stride(0), values.shape[-1], rows, COLUMNS=CLEARED)

    @classmethod
    def of_product(cls, product: Tensor, transform: Transform, first: int, rows: slice, columns: slice) -> TritonTile:
        """See the parent."""
        return cls(Memory(product, product.shape[-1]), transform, first, rows, columns)

    @classmethod
    def of_tensor(cls, tensor: TensorRows, transform: Transform, first: int, rows: slice) -> TritonTile:
        """See the parent: the rows are read where they are."""
        memory = Memory.of(tensor, rows)
        return cls(memory, transform, first, rows, slice(0, memory.width))

    def select(self, sampled: Tensor, k: int, logits: Tensor, outside: TailSums) -> Tensor:
        """See the parent; NaN is selected last."""
        return select_triton.select(self.memory, self.transform, self.first, sampled, k, logits, outside)

    def read(self, support: Support, logits: Tensor, outside: TailSums) -> None:
        """See the parent; the tile is not changed."""
        rows, slots = support.ids.shape
        if not rows:
            return
        entropy = outside.weighted_sum is not None
        sums, memory = ("maximum", "exp_sum", "weighted_sum"), self.memory
        with launching_on(logits.device):
            launcher(_read_kernel, (rows,), rows, memory.width, memory.values, restore=sums)(
                *memory.arguments(self.transform),
                self.first,
                support.ids.contiguous(),
                support.ascending.contiguous(),
                slots,
                logits,
                outside.maximum,
                outside.exp_sum,
                outside.weighted_sum if entropy else outside.exp_sum,  # which is not touched twice
                ENTROPY=entropy,
                SLOTS=triton.next_power_of_2(slots),
                **memory.constants(self.transform),
            )

    def gradient(self, support: Support, upstream: Upstream) -> Tensor:
        """See the parent; rounded to the memory's dtype."""
        self._write(support, upstream, self.memory)
        return self.memory.values

    def write_gradient(self, support: Support, upstream: Upstream, out: TensorRows) -> None:
        """See the parent."""
        rows = TensorRows(out.values.view(-1, out.values.shape[-1]), out.row_index)
        self._write(support, upstream, Memory.of(rows, self.rows))

    def _write(self, support: Support, upstream: Upstream, out: Memory) -> None:
        """Writes the gradient to memory with rows and columns like the tile's."""
        rows, slots = support.ids.shape
        if not rows:
            return
        memory = self.memory
        # Gradients of sums come expanded.
        upstream = Upstream._make(None if x is None else x.contiguous() for x in upstream)
        # A launch overwrites what it reads, and a copy of all logits, to try sizes on, would be too large.
        in_place = out.values.untyped_storage().data_ptr() == memory.values.untyped_storage().data_ptr()
        restore = None if in_place else ()

        with launching_on(memory.values.device):
            launcher(_gradient_kernel, grid_of(rows, memory.width), rows, memory.width, memory.values, restore=restore)(
                *memory.arguments(self.transform),
                *out.place,
                self.first,
                support.ids.contiguous(),
                slots,
                *upstream,
                ENTROPY=upstream.tail_entropy is not None,
                OUT_ALIGNMENT=out.alignment,
                SLOTS=triton.next_power_of_2(slots),
                **memory.constants(self.transform),
            )


@triton.jit
def _products_kernel(
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


@triton.jit
def _clear_kernel(values, stride, width, rows, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.where(tl.load(rows + row) != 0, width, 0)
    tl.store(values + row * stride + at, tl.zeros([COLUMNS], values.dtype.element_ty), mask=at < end)


@triton.jit
def _read_kernel(
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
def _gradient_kernel(
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
