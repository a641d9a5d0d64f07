"""The kernels that select the K largest logits and add up all others, against the torch code next to them.

The selected tokens are the very same, ties included.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.troll.trust_region.reading.tiles import (
    DEVICE,
    FIRST,
    Folded,
    Made,
    assert_folds_agree,
    made,
    random_values,
    unchanged,
)
from troll.trust_region.reading.memory_triton import Memory
from troll.trust_region.reading.tiles import Support, TailSums, Tile, Transform, rows_of
from troll.trust_region.reading.tiles_triton import TritonTile


def sampled_around(width: int) -> Tensor:
    return torch.tensor([FIRST, FIRST + width - 1, FIRST - 1, FIRST + width], device=DEVICE)


def select_by(tile: Tile, sampled: Tensor, k: int, entropy: bool, dtype: torch.dtype) -> tuple[Tensor, Folded]:
    """Ids, logits and sums, in slices of tensors, as a capture passes them."""
    logits = torch.full((len(sampled) + 2, k + 1), -torch.inf, device=DEVICE, dtype=dtype)
    outside = TailSums.empty(logits, entropy)
    within = slice(1, -1)
    ids = tile.select(sampled, k, logits[within], rows_of(outside, within))
    assert logits[[0, -1]].isneginf().all() and not outside.exp_sum[[0, -1]].any()
    return ids, (logits[within], rows_of(outside, within))


def assert_selects_alike(part: Made, sampled: Tensor, k: int, entropy: bool = True) -> tuple[Tensor, TailSums]:
    before = part.memory.clone()
    ids, actual = select_by(part.tile, sampled, k, entropy, torch.float32)
    assert unchanged(before, part.memory)
    expected_ids, _ = select_by(part.for_torch(torch.float32), sampled, k, entropy, torch.float32)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    # Sums in float64 over what was selected: near the cap, it may order logits that are equal in float32.
    tile, logits = part.for_torch(), torch.full_like(actual[0], -torch.inf, dtype=torch.float64)
    sums = TailSums.empty(logits, entropy)
    tile.read(Support.from_ids(ids), logits, sums)
    assert_folds_agree(actual, (logits, sums))
    return ids, actual[1]


@pytest.mark.parametrize(
    ("width", "k", "levels"),
    [
        (1, 1, 40),
        (5, 3, 1),
        (64, 64, 40),  # one block, all of it
        (129, 2, 1),  # more blocks than k by a block of one column
        (128, 2, 40),
        (700, 1, 40),
        (1000, 15, 1),
        (1000, 16, 40),  # blocks = k
        (4097, 66, 40),
    ],
)
def test_select_of_ties_agrees_at_any_width(width, k, levels):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-levels, levels, (4, width), generator=generator).float().to(DEVICE)
    values[1] = torch.where(torch.rand(width, generator=generator).to(DEVICE) < 0.5, 0.0, -0.0)
    values[2, : max(width - k // 2, 0)] = -torch.inf  # fewer finite ones than k
    assert_selects_alike(made(values), sampled_around(width), k)


def test_select_orders_numbers_of_every_size():
    """All bits of the integers that stand for them are looked at: signs, exponents, subnormal numbers, infinities."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (4, 3000), generator=generator).int()
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.copysign(torch.tensor(torch.inf), values)).to(DEVICE)
    values[2] = torch.linspace(-1e-38, 0, 3000)
    values[3] = -values[3].abs()
    assert_selects_alike(made(values), sampled_around(3000), 33)


@pytest.mark.parametrize("selected", [[64 * 2 + 1, 64 * 2 + 9, 64 * 5], [64 * 7 + 50]], ids=["three", "one"])
@pytest.mark.parametrize("block", ["chosen", "not chosen", "the last one", "selected"])
def test_select_leaves_selected_out_of_sums(selected, block):
    """All weigh so much that the others would be lost in their sum; so would a difference from it."""
    values, columns = torch.zeros(1, 500, device=DEVICE), torch.tensor(selected, device=DEVICE)
    values[0, columns] = 100.0
    first, last = selected[0], selected[-1]
    sampled = {"chosen": first + 1, "not chosen": 64 * 3 + 5, "the last one": 499, "selected": last}[block]
    values[0, sampled] = max(float(values[0, sampled]), 50.0)
    ids, outside = assert_selects_alike(made(values), torch.tensor([FIRST + sampled], device=DEVICE), len(selected))
    assert ids[0].tolist() == [*(FIRST + columns).tolist(), -1 if block == "selected" else FIRST + sampled]
    assert outside.maximum.tolist() == [0.0]
    assert outside.exp_sum.tolist() == [500 - len(selected) - (block != "selected")]


@settings(max_examples=18, deadline=None, derandomize=True)
@given(
    values=st.lists(st.sampled_from([-math.inf, -300.0, -2.0, -0.0, 0.0, 1.0, 300.0]), min_size=1, max_size=12),
    repeats=st.sampled_from([1, 3, 30]),
    entropy=st.booleans(),
    data=st.data(),
)
def test_select_of_any_row_agrees_with_torch(values, repeats, entropy, data):
    """Few and many blocks of logits that tie, with the sampled token anywhere."""
    row = torch.tensor(values, device=DEVICE).repeat_interleave(repeats).unsqueeze(0)
    width = row.shape[-1]
    k = data.draw(st.integers(1, min(width, 6)))
    sampled = data.draw(st.integers(FIRST - 2, FIRST + width + 1))
    assert_selects_alike(made(row), torch.tensor([sampled], device=DEVICE), k, entropy)


def test_select_refuses_too_wide_tile():
    width = 2**20 + 1
    tile = TritonTile(Memory(random_values(1, 100), width), Transform(), FIRST, slice(0, 1), slice(0, width))
    with pytest.raises(ValueError, match="1048576 wide at most, got 1048577: set TROLL_KERNELS=torch"):
        select_by(tile, torch.zeros(1, dtype=torch.int64, device=DEVICE), 4, True, torch.float32)
