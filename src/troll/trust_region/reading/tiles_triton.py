"""The Triton counterpart of `tiles`: each kernel reads a tile's memory once, in its own dtype, and computes in float32.

A tile is the source's numbers where they are, and logits are computed in registers. Only a gradient is written. Here
are the launches; the kernels are in `select_triton`, `read_triton` and `head_triton`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..kernels import KERNELS_VARIABLE, launching_on
from ..policy.top import BLOCK
from .head_triton import products_kernel
from .launch_triton import grid_of, launcher, select_warps
from .memory_triton import Memory
from .read_triton import clear_kernel, gradient_kernel, read_kernel
from .select_triton import LARGEST_WIDTH, PARTS, block_sums_kernel, outside_kernel, select_kernel
from .tiles import Support, TailSums, TensorRows, Tile, Transform, Upstream

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
            launcher(products_kernel, (rows, triton.cdiv(slots, MULTIPLIED)), rows, hidden.shape[1], weight)(
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
                clear_kernel[grid](values, values.stride(0), values.shape[-1], rows, COLUMNS=CLEARED)

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
        """See the parent, with three launches, or two; NaN is selected last.

        Raises:
            ValueError: If the tile is wider than `LARGEST_WIDTH`.
        """
        memory, width = self.memory, self.memory.width
        if width > LARGEST_WIDTH:
            raise ValueError(f"a tile may be {LARGEST_WIDTH} wide at most, got {width}: set {KERNELS_VARIABLE}=torch")
        rows, blocks = len(sampled), triton.cdiv(width, BLOCK)
        ids = sampled.new_empty((rows, k + 1), dtype=torch.int64)
        if not rows:
            return ids
        # With so few blocks, all of them are candidates.
        everything = blocks <= k
        entropy = outside.weighted_sum is not None
        of_blocks = logits.new_empty((3 if entropy else 2, 0 if everything else rows, blocks))
        parts = of_blocks[0], of_blocks[1], of_blocks[2] if entropy else None
        chosen, selected = (sampled.new_empty((rows, n), dtype=torch.int32) for n in (k + 1, k))
        arguments, constants = memory.arguments(self.transform), memory.constants(self.transform) | {"BLOCK": BLOCK}
        held = 1 if everything else triton.next_power_of_2(blocks)
        candidates = triton.next_power_of_2(blocks if everything else k)

        with launching_on(sampled.device):
            if not everything:
                launcher(block_sums_kernel, grid_of(rows, width), rows, width, memory.values)(
                    *arguments, *parts, blocks, ENTROPY=entropy, **constants
                )
            select_kernel[(rows,)](
                *arguments,
                self.first,
                parts[0],
                blocks,
                chosen,
                selected,
                sampled.contiguous(),
                ids,
                logits,
                k,
                **constants,
                EVERYTHING=everything,
                BLOCKS=held,
                CANDIDATES=candidates,
                SLOTS=triton.next_power_of_2(k),
                num_warps=select_warps(max(held, candidates * BLOCK)),
            )
            outside_kernel[(rows,)](
                *arguments,
                *parts,
                blocks,
                chosen,
                selected,
                ids,
                self.first,
                k,
                *outside,
                **constants,
                ENTROPY=entropy,
                EVERYTHING=everything,
                PARTS=PARTS,
            )
        return ids

    def read(self, support: Support, logits: Tensor, outside: TailSums) -> None:
        """See the parent; the tile is not changed."""
        rows, slots = support.ids.shape
        if not rows:
            return
        entropy = outside.weighted_sum is not None
        sums, memory = ("maximum", "exp_sum", "weighted_sum"), self.memory
        with launching_on(logits.device):
            launcher(read_kernel, (rows,), rows, memory.width, memory.values, restore=sums)(
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
            launcher(gradient_kernel, grid_of(rows, memory.width), rows, memory.width, memory.values, restore=restore)(
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
