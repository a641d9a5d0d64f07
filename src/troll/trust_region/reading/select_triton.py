"""The K largest logits of a row without sorting: the K blocks with the largest maxima, and the largest in these.

Both times the threshold is found digit by digit on integers that order like the numbers: a count takes one pass over
registers, and a sort of the same numbers dozens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import VARIABLE, launching_on
from ..policy.top import BLOCK
from ..probabilities_triton import sortable
from . import tiles
from .launch_triton import grid_of, launcher, select_warps
from .memory_triton import Memory, logits_of, row_of
from .tiles import Support, Transform

_NO_TOKEN = tl.constexpr(tiles.NO_TOKEN)

#: The widest tile: a program holds its blocks' maxima in registers, and counts them in 15 bits.
LARGEST_WIDTH = 2**20

#: A block number beyond all blocks of a tile.
_NO_BLOCK = tl.constexpr(2**24)


def select(memory: Memory, transform: Transform, first: int, sampled: Tensor, k: int) -> Support:
    """Computes `Tile.select` for the tile in this memory with two kernel launches; NaN is selected last.

    Raises:
        ValueError: If the tile is wider than `LARGEST_WIDTH`.
    """
    width = memory.width
    if width > LARGEST_WIDTH:
        raise ValueError(f"a tile may be {LARGEST_WIDTH} wide at most, got {width}: set {VARIABLE}=torch")
    rows, blocks = len(sampled), triton.cdiv(width, BLOCK)
    ids, ascending = (sampled.new_empty((rows, k + 1), dtype=torch.int64) for _ in range(2))
    if not rows:
        return Support(ids, ascending)
    # With so few blocks, all of them are candidates.
    everything = blocks <= k
    maxima = sampled.new_empty((0 if everything else rows, blocks), dtype=torch.float32)
    chosen, selected = (sampled.new_empty((rows, k), dtype=torch.int32) for _ in range(2))
    arguments, constants = memory.arguments(transform), memory.constants(transform) | {"BLOCK": BLOCK}
    held = 1 if everything else triton.next_power_of_2(blocks)
    candidates = triton.next_power_of_2(blocks if everything else k)

    with launching_on(sampled.device):
        if not everything:
            launcher(_block_maxima_kernel, grid_of(rows, width), rows, width, memory.values)(
                *arguments, maxima, blocks, **constants
            )
        _select_kernel[(rows,)](
            *arguments,
            first,
            maxima,
            blocks,
            chosen,
            selected,
            sampled.contiguous(),
            ids,
            ascending,
            k,
            **constants,
            EVERYTHING=everything,
            BLOCKS=held,
            CANDIDATES=candidates,
            SLOTS=triton.next_power_of_2(k),
            num_warps=select_warps(max(held, candidates * BLOCK)),
        )
    return Support(ids, ascending)


@triton.jit
def _block_maxima_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    maxima,  # (n, blocks)
    blocks,
    SOFTCAP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    z = logits_of(tl.load(tile + column, mask=inside, other=0.0), scale, cap, SOFTCAP)
    # NaN would be the maximum on some machines only.
    z = tl.where(inside & (z == z), z, float("-inf"))
    tl.store(maxima + row * blocks + block, tl.max(z, axis=1), mask=block < blocks)


@triton.jit
def _select_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    first,
    maxima,  # (n, blocks)
    blocks,
    chosen,  # (n, k): the numbers of the blocks, ascending
    selected,  # (n, k): of the candidates in these
    sampled,  # (n,)
    ids,  # (n, k + 1), like the next parameter
    ascending,
    k,
    SOFTCAP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERYTHING: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    chosen += row * k
    selected += row * k
    if not EVERYTHING:
        block = tl.arange(0, BLOCKS)
        maximum = tl.load(maxima + row * blocks + block, mask=block < blocks, other=0.0)
        place = places(ordered(maximum, block < blocks), k)
        tl.store(chosen + place, block, mask=place >= 0)
        # A thread will read numbers that others wrote; and once more below.
        tl.debug_barrier()

    # Blocks ascend, and so do columns: of equal logits the one with the smaller id comes first.
    candidate = tl.arange(0, CANDIDATES * BLOCK)
    column = column_of(candidate, chosen, k, EVERYTHING, BLOCK)
    present = column < width
    z = logits_of(tl.load(tile + column, mask=present, other=0.0), scale, cap, SOFTCAP)
    place = places(ordered(z, present), k)
    # Kept as a number, since its column would take a register during the search.
    tl.store(selected + place, candidate, mask=place >= 0)
    tl.debug_barrier()

    slot = tl.arange(0, SLOTS)
    used = slot < k
    candidate = tl.load(selected + slot, mask=used, other=0)
    token = column_of(candidate, chosen, k, EVERYTHING, BLOCK).to(tl.int64) + first
    wanted = tl.load(sampled + row)
    known = tl.sum((used & (token == wanted)).to(tl.int32)) > 0
    added = (wanted >= first) & (wanted < first + width) & (known == 0)
    smaller = tl.sum((used & (token < wanted)).to(tl.int32))
    ids += row * (k + 1)
    tl.store(ids + slot, token, mask=used)
    tl.store(ids + k, tl.where(added, wanted, -1))
    ascending += row * (k + 1)
    tl.store(ascending + slot + (added & (token > wanted)).to(tl.int32), token, mask=used)
    tl.store(ascending + tl.where(added, smaller, k), tl.where(added, wanted, _NO_TOKEN))


@triton.jit
def column_of(candidate, chosen, k, EVERYTHING: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of candidates, which are those of the chosen blocks, or all; beyond them, past all columns."""
    if EVERYTHING:
        column = candidate
    else:
        at = candidate // BLOCK
        column = tl.load(chosen + at, mask=at < k, other=_NO_BLOCK) * BLOCK + candidate % BLOCK
    return column


@triton.jit
def ordered(z, present):
    """Unsigned integers that order like float32 numbers, with NaN like −inf; 0 for absent numbers."""
    key = sortable(tl.where(z == z, z, float("-inf"))) ^ -(2**31)  # the order of signed ones, moved up
    return tl.where(present, key.to(tl.uint32, bitcast=True), 0)


@triton.jit
def places(key, k):
    """The place of each number among the k largest of a vector, by position; −1 for all others.

    Of equal numbers, the one with the smaller position is the larger. At least k numbers must be above 0.
    """
    # Two bits a round, until the k largest are told from the rest: half as many rounds as with one bit, and the three
    # counts are summed as one number.
    threshold = tl.sum(key * 0)
    at_least = k + 1  # numbers that reach the threshold
    step = threshold + 2**30
    while (step > 0) & (at_least != k):
        one, two, three = threshold + step, threshold + 2 * step, threshold + 3 * step
        counts = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20) + ((key >= three).to(tl.int64) << 40)
        counts = tl.sum(counts)
        reach_one = (counts & 0xFFFFF).to(tl.int32)
        reach_two = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        reach_three = (counts >> 40).to(tl.int32)
        at_least = tl.where(reach_one >= k, reach_one, at_least)
        at_least = tl.where(reach_two >= k, reach_two, at_least)
        at_least = tl.where(reach_three >= k, reach_three, at_least)
        threshold = tl.where(reach_one >= k, one, threshold)
        threshold = tl.where(reach_two >= k, two, threshold)
        threshold = tl.where(reach_three >= k, three, threshold)
        step = step // 4

    above, equal = key > threshold, key == threshold
    # Both counts in one scan: neither passes 2¹⁵.
    running = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    running_above, running_equal = running & 0xFFFF, running >> 16
    taken = k - tl.sum(above.to(tl.int32))
    chosen = above | (equal & (running_equal <= taken))
    return tl.where(chosen, running_above + tl.minimum(running_equal, taken) - 1, -1)
