"""The kernel that multiplies single entries of a head, against the torch code next to it in float64."""

import pytest
import torch

pytest.importorskip("triton")

from tests.tolerance import rounding, within
from tests.trust_region.reading.tiles import DEVICE, some_ids
from troll.trust_region.reading.tiles import Tile
from troll.trust_region.reading.tiles_triton import TritonTile

gathered_products = TritonTile.gathered_products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("slots", "width"), [(1, 16), (20, 300)])
def test_gathered_products_agree_with_torch(slots, width, dtype, weight_dtype, bias):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, width, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(50, width, generator=generator).to(DEVICE, weight_dtype)
    if dtype == torch.bfloat16:
        # The interpreter cuts off where a GPU rounds to it; float16 shows that operands are rounded at all.
        weight = weight.to(dtype).to(weight_dtype)
    biases = torch.randn(50, generator=generator).to(DEVICE, weight_dtype) if bias else None
    ids = some_ids(3, slots, 0, 50, unused=slots // 4)
    ids[2] = -1
    actual = gathered_products(hidden, weight, biases, ids, 0)
    # Products of operands in the hidden states' dtype; nothing else is rounded to it.
    rounded = weight.to(dtype).double()
    expected = Tile.gathered_products(hidden.double(), rounded, biases if biases is None else biases.double(), ids, 0)
    assert actual.dtype == torch.float32
    # A sum of `width` terms is off by less than an ulp of their sizes for each of them; three times as much.
    size = Tile.gathered_products(hidden.double().abs(), rounded.abs(), None, ids, 0)
    used = ids >= 0
    assert ((actual - expected).abs() <= 3 * 2.0**-24 * width * (size + 1))[used].all()
    assert actual[~used].isneginf().all()


def test_any_strides():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(16, 3, generator=generator), torch.randn(16, 50, generator=generator)
    ids = some_ids(3, 4, 0, 50)
    transposed = gathered_products(hidden.to(DEVICE).t(), weight.to(DEVICE).t(), None, ids, 0)
    contiguous = gathered_products(hidden.to(DEVICE).t().contiguous(), weight.to(DEVICE).t().contiguous(), None, ids, 0)
    # A compiler may order 16 summands as it loads them.
    size = gathered_products(hidden.to(DEVICE).t().abs(), weight.to(DEVICE).t().abs(), None, ids, 0)
    assert ((transposed - contiguous).abs() <= within(rounding(16)) * size).all()


def test_a_slice_of_the_vocabulary():
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(3, 16, generator=generator), torch.randn(40, 16, generator=generator)
    hidden, weight, ids = hidden.to(DEVICE), weight.to(DEVICE), some_ids(3, 12, 0, 40, unused=2)
    whole = gathered_products(hidden, weight, None, ids, 0)
    slices = [gathered_products(hidden, weight[first : first + 10], None, ids, first) for first in (0, 10, 20, 30)]
    assert torch.equal(torch.stack(slices).amax(0), whole)
    assert all(part.isneginf().any() for part in slices)


def test_unused_weights_are_not_read():
    weight = torch.full((4, 16), torch.nan, device=DEVICE)
    weight[2] = 1.0
    ids = torch.tensor([[-1, 2, -1]], device=DEVICE)
    assert gathered_products(torch.ones(1, 16, device=DEVICE), weight, None, ids, 0).tolist() == [
        [-torch.inf, 16.0, -torch.inf]
    ]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_gathered_products_of_nothing(shape):
    ids = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    hidden, weight = torch.ones(shape[0], 16, device=DEVICE), torch.ones(5, 16, device=DEVICE)
    assert gathered_products(hidden, weight, None, ids, 0).shape == shape
