"""What torch does with one tile, of any part of the logits: transform, select, read, gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import tensor
from tests.troll.trust_region.reading.sources import TRANSFORMS, plainly
from troll.trust_region.reading.tiles import Support, TailSums, Tile, Transform


def tile_of(values: Tensor, first: int = 0) -> Tile:
    """In memory of its own, which may be used up."""
    return Tile(values.clone(), Transform(), first, slice(0, len(values)), slice(0, values.shape[-1]))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_transform_and_slope_agree_with_autograd(name, dtype):
    transform = Transform(**TRANSFORMS[name])
    raw = (4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = raw.double().requires_grad_()
    z = plainly(exact, *transform)
    (slope,) = torch.autograd.grad(z.sum(), exact)
    actual = transform(raw.clone())
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # A few roundings each.
    eps = 1e-15 if dtype == torch.float64 else 2.0**-22
    torch.testing.assert_close(actual.double(), z, rtol=4 * eps, atol=0)
    ours = torch.as_tensor(transform.slope(actual), dtype=torch.float64).expand_as(slope)
    # 1 − (z T/c)² cancels where the cap is near.
    torch.testing.assert_close(ours, slope, rtol=eps, atol=4 * eps * transform.scale / transform.temperature)


def test_plain_transform_of_float32_is_identity():
    raw, plain = torch.randn(3, 4), Transform()
    assert plain(raw) is raw and plain.slope(raw) == 1.0


LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, -300.0, 300.0, -math.inf]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(LOGIT, min_size=1, max_size=14),
    with_entropy=st.booleans(),
    data=st.data(),
)
def test_read_sums_any_partition_into_tiles(values, with_entropy, data):
    row, width = np.array(values), len(values)
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1)))) if width > 1 else []
    ids = data.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=width))
    support = Support.from_ids(torch.tensor([[*ids, -1]]))
    z = tensor(row[None])
    logits = torch.full((1, len(ids) + 1), 7.0, dtype=torch.float64)
    outside = TailSums.empty(logits, with_entropy)
    for start, stop in zip([0, *cuts], [*cuts, width], strict=True):
        tile_of(z[:, start:stop], start).read(support, logits, outside)
    assert logits[0].tolist() == [*row[ids], 7.0]  # what no tile has is left alone
    rest = row[reference.complement(width, ids)]
    expected = reference.log_sum_exp(rest)
    assert outside.log_sum.item() == pytest.approx(expected, rel=1e-14, abs=1e-14)
    assert outside.maximum.item() == (rest.max() if rest.size else -math.inf)
    if with_entropy:
        assert outside.weighted_sum is not None
        finite = rest[rest > -np.inf]
        weighted = float(np.sum(np.exp(finite - finite.max()) * (finite - finite.max()))) if finite.size else 0.0
        assert outside.weighted_sum.item() == pytest.approx(weighted, rel=1e-12, abs=1e-14)
