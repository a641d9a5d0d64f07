"""The K largest logits of a row, and the sums over all others, from one pass over the tile and no sort.

The pass gives each block's maximum and sums. The K blocks with the largest maxima contain the K largest logits, so only
these are read again: to select the logits, and to add up those that are not selected. What is selected is in no sum, so
that the tail is never a difference.

Both selections find their threshold digit by digit on integers that order like the numbers: a count takes one pass over
registers, and a sort of the same numbers dozens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ..probabilities_triton import sortable
from .memory_triton import logits_of, row_of

#: The widest tile: a program holds its blocks' maxima in registers, and counts them in 15 bits.
LARGEST_WIDTH = 2**20

#: Blocks, or logits, whose sums a program adds up at once.
PARTS = 1024

#: A block number beyond all blocks of a tile, and a position beyond all others.
_NO_BLOCK, _NOWHERE = tl.constexpr(2**24), tl.constexpr(2**31 - 1)


@triton.jit
def block_sums_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    maxima,  # (n, blocks), like the next two parameters
    exp_sums,
    weighted_sums,
    blocks,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The maximum and the sums of each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    block = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    z = logits_of(tl.load(tile + column, mask=inside, other=0.0), scale, cap, SOFTCAP)
    z = tl.where(inside, z, float("-inf"))
    # NaN would be the maximum on some machines only; the sums keep it.
    maximum = tl.max(tl.where(z == z, z, float("-inf")), axis=1)
    z -= tl.where(maximum == float("-inf"), 0.0, maximum)[:, None]
    exp = tl.exp(z)
    at = row * blocks + block
    tl.store(maxima + at, maximum, mask=block < blocks)
    tl.store(exp_sums + at, tl.sum(exp, axis=1), mask=block < blocks)
    if ENTROPY:
        weighted = tl.where(exp > 0.0, exp * z, 0.0)  # −inf · 0 would be NaN
        tl.store(weighted_sums + at, tl.sum(weighted, axis=1), mask=block < blocks)


@triton.jit
def select_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    first,
    maxima,  # (n, blocks)
    blocks,
    chosen,  # (n, k + 1): the numbers of the blocks, ascending; last that of the sampled token's, if it is another
    selected,  # (n, k): of the candidates in the chosen blocks
    sampled,  # (n,)
    ids,  # (n, k + 1), like the next parameter
    logits,
    k,
    SOFTCAP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERYTHING: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The k largest logits of a row, in two selections: of blocks, unless all are candidates, and in these."""
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    chosen += row * (k + 1)
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
    column = column_of(tl.load(selected + slot, mask=used, other=0), chosen, k, EVERYTHING, BLOCK)
    z = logits_of(tl.load(tile + column, mask=used, other=0.0), scale, cap, SOFTCAP)
    token = column.to(tl.int64) + first
    wanted = tl.load(sampled + row)
    known = tl.sum((used & (token == wanted)).to(tl.int32)) > 0
    added = (wanted >= first) & (wanted < first + width) & (known == 0)
    wanted_column = tl.where(added, wanted - first, 0).to(tl.int32)
    wanted_z = logits_of(tl.load(tile + wanted_column), scale, cap, SOFTCAP)
    ids += row * (k + 1)
    tl.store(ids + slot, token, mask=used)
    tl.store(ids + k, tl.where(added, wanted, -1))
    logits += row * (k + 1)
    tl.store(logits + slot, z, mask=used)
    tl.store(logits + k, tl.where(added, wanted_z, float("-inf")))
    if not EVERYTHING:
        wanted_block = wanted_column // BLOCK
        known = tl.sum((used & (tl.load(chosen + slot, mask=used, other=0) == wanted_block)).to(tl.int32)) > 0
        tl.store(chosen + k, tl.where(added & (known == 0), wanted_block, _NO_BLOCK))


@triton.jit
def outside_kernel(
    values,
    offsets,
    stride,
    width,
    scale,
    cap,
    maxima,  # (n, blocks), like the next two parameters
    exp_sums,
    weighted_sums,
    blocks,
    chosen,  # (n, k + 1)
    selected,  # (n, k)
    ids,  # (n, k + 1)
    first,
    k,
    maximum,  # (n,), like the next two parameters
    exp_sum,
    weighted_sum,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVERYTHING: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The sums over what was not selected in a row: of whole blocks, and logit by logit in the chosen ones."""
    row = tl.program_id(0).to(tl.int64)
    tile = row_of(values, offsets, stride, row, ALIGNMENT)
    chosen += row * (k + 1)
    selected += row * k
    m, total = tl.load(maximum + row), tl.load(exp_sum + row)
    weighted = tl.load(weighted_sum + row) if ENTROPY else 0.0 * total

    # The blocks that hold nothing of what was selected: not the chosen ones, nor the sampled token's.
    if not EVERYTHING:
        sampled_block, at = tl.load(chosen + k), 0
        for start in range(0, blocks, PARTS):
            block = start + tl.arange(0, PARTS)
            rest = (block < blocks) & (block != sampled_block)
            rest, at = without(rest, block, start + PARTS, chosen, at, k)
            part_maximum = tl.load(maxima + row * blocks + block, mask=rest, other=float("-inf"))
            part_total = tl.load(exp_sums + row * blocks + block, mask=rest, other=0.0)
            part_weighted = part_total * 0.0
            if ENTROPY:
                part_weighted = tl.load(weighted_sums + row * blocks + block, mask=rest, other=0.0)
            m, total, weighted = folded(m, total, weighted, part_maximum, part_total, part_weighted)

    # Those blocks, logit by logit, without what was selected.
    sampled_column = tl.load(ids + row * (k + 1) + k) - first
    at = 0
    for start in range(0, width if EVERYTHING else (k + 1) * BLOCK, PARTS):
        candidate = start + tl.arange(0, PARTS)
        column = column_of(candidate, chosen, k + 1, EVERYTHING, BLOCK)
        rest = (column < width) & (column != sampled_column)
        rest, at = without(rest, candidate, start + PARTS, selected, at, k)
        z = logits_of(tl.load(tile + column, mask=rest, other=0.0), scale, cap, SOFTCAP)
        m, total, weighted = folded(m, total, weighted, tl.where(rest, z, float("-inf")), 1.0, 0.0)

    tl.store(maximum + row, m)
    tl.store(exp_sum + row, total)
    if ENTROPY:
        tl.store(weighted_sum + row, weighted)


@triton.jit
def without(mask, position, end, left_out, at, count):
    """A mask without the positions in an ascending list, of which entries from `at` on may be below `end`.

    Also returns the first entry that is not.
    """
    following = tl.load(left_out + at, mask=at < count, other=_NOWHERE)
    while following < end:
        mask &= position != following
        at += 1
        following = tl.load(left_out + at, mask=at < count, other=_NOWHERE)
    return mask, at


@triton.jit
def folded(m, total, weighted, maximum, exp_sum, weighted_sum):
    """A row's `TailSums` (m, total, weighted) with those of some parts of it, in vectors, added.

    A logit is a part with the sums 1 and 0; −inf adds nothing. NaN and +inf make the total NaN.
    """
    # A maximum may drop NaN, but the total keeps it.
    m_now = tl.maximum(m, tl.max(maximum, axis=0))
    center = tl.where(m_now == float("-inf"), 0.0, m_now)
    rescale, rescale_parts = tl.exp(m - center), tl.exp(maximum - center)
    # −inf · 0 would be NaN.
    moved = tl.where(rescale > 0.0, m - center, 0.0)
    moved_parts = tl.where(rescale_parts > 0.0, maximum - center, 0.0)
    weighted = rescale * (weighted + total * moved)
    weighted += tl.sum(rescale_parts * (weighted_sum + exp_sum * moved_parts), axis=0)
    total = rescale * total + tl.sum(rescale_parts * exp_sum, axis=0)
    return m_now, total, weighted


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
