"""The kernels that select the K largest logits, against the torch code: the very same tokens, ties included."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.troll.trust_region.reading.tiles import (
    DEVICE,
    DTYPES,
    FIRST,
    FORMS,
    TRANSFORMS,
    Made,
    made,
    random_values,
    unchanged,
)
from troll.trust_region.policy.top import BLOCK
from troll.trust_region.reading.memory_triton import Memory
from troll.trust_region.reading.tiles import NO_TOKEN, Support, Transform
from troll.trust_region.reading.tiles_triton import TritonTile


def sampled_around(width: int) -> Tensor:
    return torch.tensor([FIRST, FIRST + width - 1, FIRST - 1, FIRST + width], device=DEVICE)


def assert_selects_alike(part: Made, sampled: Tensor, k: int) -> Support:
    before = part.memory.clone()
    actual = part.tile.select(sampled, k)
    expected = part.for_torch(torch.float32).select(sampled, k)
    assert actual.ids.dtype == actual.ascending.dtype == torch.int64
    assert torch.equal(actual.ids, expected.ids)
    assert torch.equal(actual.ascending, expected.ascending)
    assert unchanged(before, part.memory)
    return actual


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "form"), list(zip(DTYPES, FORMS, strict=True)))
def test_random_logits(dtype, transform, form):
    """Half precision is full of ties."""
    part = made(random_values(4, 1500, dtype), TRANSFORMS[transform], form)
    if dtype == torch.float32 and transform in ("softcap", "all"):
        # A tanh of ours and one of torch's may differ by an ulp, which must not decide.
        part = made(random_values(4, 1500, torch.bfloat16).float(), TRANSFORMS[transform], form)
    assert_selects_alike(part, sampled_around(1500), 20)


@pytest.mark.parametrize("levels", [1, 40])
@pytest.mark.parametrize(
    ("width", "k"),
    [
        (1, 1),
        (5, 3),
        (64, 64),  # one block, all of it
        (129, 2),  # more blocks than k by a block of one column
        (128, 2),
        (700, 1),
        (1000, 15),
        (1000, 16),  # blocks = k
        (4097, 70),
    ],
)
def test_ties_and_widths(width, k, levels):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-levels, levels, (4, width), generator=generator).float().to(DEVICE)
    values[1] = torch.where(torch.rand(width, generator=generator).to(DEVICE) < 0.5, 0.0, -0.0)
    values[2, : max(width - k // 2, 0)] = -torch.inf  # fewer finite ones than k
    assert_selects_alike(made(values), sampled_around(width), k)


def test_numbers_of_every_size():
    """All bits of the integers that stand for them are looked at: signs, exponents, subnormal numbers, infinities."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (4, 3000), generator=generator).int()
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.copysign(torch.tensor(torch.inf), values)).to(DEVICE)
    values[2] = torch.linspace(-1e-38, 0, 3000)
    values[3] = -values[3].abs()
    assert_selects_alike(made(values), sampled_around(3000), 33)


def test_large_k():
    part = made(random_values(2, 200 * BLOCK, torch.bfloat16))
    assert_selects_alike(part, sampled_around(part.tile.memory.width)[:2], 130)


@pytest.mark.parametrize("at", ["smallest", "between", "largest", "selected"])
def test_where_the_sampled_token_stands_in_ascending_order(at):
    """Among the selected 20, 30, ..., 70."""
    columns = torch.arange(20, 80, 10, device=DEVICE)
    values = torch.zeros(1, 500, device=DEVICE)
    values[0, columns] = 1.0
    sampled = {"smallest": 3, "between": 45, "largest": 499, "selected": 30}[at]
    support = assert_selects_alike(made(values), torch.tensor([FIRST + sampled], device=DEVICE), 6)
    assert support.ids[0, -1] == (-1 if at == "selected" else FIRST + sampled)
    assert (support.ascending[0, -1] == NO_TOKEN) == (at == "selected")


def test_rows_that_are_no_distribution_select_as_many_tokens():
    """Which ones does not matter, but they have to be ids, different ones."""
    values = random_values(4, 700)
    values[0] = torch.nan
    values[1, ::3] = torch.nan
    values[2, 5] = torch.inf
    values[3] = -torch.inf
    support = made(values).tile.select(torch.full((4,), FIRST - 1, device=DEVICE), 7)
    assert (support.ids[:, :7] >= FIRST).all() and (support.ids[:, :7] < FIRST + 700).all()
    assert (support.ids[:, :7].diff() > 0).all()
    assert (support.ids[2] == FIRST + 5).any() and (support.ids[:, 7] == -1).all()


def test_no_rows():
    nothing = slice(0, 0)
    tile = TritonTile(Memory(random_values(0, 100), 100), Transform(), FIRST, nothing, nothing)
    support = tile.select(torch.zeros(0, dtype=torch.int64, device=DEVICE), 4)
    assert support.ids.shape == support.ascending.shape == (0, 5)


def test_a_tile_that_is_too_wide():
    width = 2**20 + 1
    tile = TritonTile(Memory(random_values(1, 100), width), Transform(), FIRST, slice(0, 1), slice(0, width))
    with pytest.raises(ValueError, match="1048576 wide at most, got 1048577: set TROLL_KERNELS=torch"):
        tile.select(torch.zeros(1, dtype=torch.int64, device=DEVICE), 4)
