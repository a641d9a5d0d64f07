"""Single logits of an LM head: products with a few rows of its weight, in float32."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from troll.trust_region.kernels import launching_on
from troll.trust_region.reading.launch_triton import launcher

#: Slots in a program: their products hide each other's latency.
SLOTS = 16


def gathered_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, first: int) -> Tensor:
    """As `Tile.gathered_products`, with the same arguments: a program gathers the weights that it multiplies."""
    rows, slots = ids.shape
    products = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if not products.numel():
        return products
    grid = (rows, triton.cdiv(slots, SLOTS))
    with launching_on(ids.device):
        launcher(_products_kernel, grid, rows, hidden.shape[1], weight)(
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
            SLOTS=SLOTS,
        )
    return products


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
