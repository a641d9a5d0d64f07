"""What is done with one tile, whatever it is a part of: transform, select, fold, gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trust_region import reference
from tests.trust_region.cases import array, tensor
from tests.trust_region.reading.sources import TRANSFORMS
from troll.trust_region.reading.fold import (
    NO_TOKEN,
    Outside,
    Support,
    SupportGradient,
    Tile,
    Transform,
    fold_support,
    gradient,
    select,
)

PLAIN = Transform()


def tile_of(values: Tensor, first: int = 0) -> Tile:
    """In memory of its own, as the functions may use it up."""
    return Tile(values.clone(), first, values.shape[-1], PLAIN)


# ---------------------------------------------------------------------------------------------------------------------
# The transform


def plainly(transform: Transform, raw: Tensor) -> Tensor:
    z = raw * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return z / transform.temperature


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_transform_and_its_slope(name, dtype):
    transform = Transform(**TRANSFORMS[name])
    raw = (4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = raw.double().requires_grad_()
    z = plainly(transform, exact)
    (slope,) = torch.autograd.grad(z.sum(), exact)
    actual = transform(raw.clone())
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # A few roundings each.
    eps = 1e-15 if dtype == torch.float64 else 2.0**-22
    torch.testing.assert_close(actual.double(), z, rtol=4 * eps, atol=0)
    ours = torch.as_tensor(transform.slope(actual), dtype=torch.float64).expand_as(slope)
    # 1 − (z T/c)² cancels where the cap is near.
    torch.testing.assert_close(ours, slope, rtol=eps, atol=4 * eps * transform.scale / transform.temperature)


def test_a_plain_transform_of_float32_touches_nothing():
    raw = torch.randn(3, 4)
    assert PLAIN(raw) is raw
    assert PLAIN.slope(raw) == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Select


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    values=st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12),
    first=st.sampled_from([0, 100]),
    data=st.data(),
)
def test_select_keeps_the_largest_and_the_sampled_token(values, first, data):
    width = len(values)
    k = data.draw(st.integers(1, width))
    sampled = data.draw(st.integers(max(0, first - 3), first + width + 3))
    tile = tile_of(torch.tensor([values]), first)
    support = select(tile, torch.tensor([sampled]), k)
    assert torch.equal(tile.values, torch.tensor([values]))
    top = sorted(sorted(range(width), key=lambda v: (-values[v], v))[:k])
    added = sampled if first <= sampled < first + width and sampled - first not in top else -1
    assert support.ids[0].tolist() == [first + v for v in top] + [added]
    ascending = sorted(v for v in support.ids[0].tolist() if v >= 0)
    assert support.ascending[0].tolist() == ascending + [NO_TOKEN] * (k + 1 - len(ascending))


# ---------------------------------------------------------------------------------------------------------------------
# Fold

LOGIT = st.one_of(st.floats(-40, 40), st.sampled_from([0.0, -300.0, 300.0, -math.inf]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(LOGIT, min_size=1, max_size=14),
    with_entropy=st.booleans(),
    data=st.data(),
)
def test_any_partition_into_tiles_has_the_same_sums(values, with_entropy, data):
    row, width = np.array(values), len(values)
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1)))) if width > 1 else []
    ids = data.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=width))
    support = Support.of(torch.tensor([[*ids, -1]]))
    z = tensor(row[None])
    logits = torch.full((1, len(ids) + 1), 7.0, dtype=torch.float64)
    outside = Outside.empty(logits, 1, with_entropy)
    for start, stop in zip([0, *cuts], [*cuts, width], strict=True):
        fold_support(tile_of(z[:, start:stop], start), support, logits, outside)
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


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_not_finite_is_not_forgotten(with_entropy, broken, at):
    """In the first tile or in the last one."""
    z = torch.zeros(2, 4)
    z[1, at] = broken
    support = Support.of(torch.tensor([[2], [2]]))
    logits = torch.zeros(2, 1)
    outside = Outside.empty(logits, 2, with_entropy)
    for start in (0, 2):
        fold_support(tile_of(z[:, start : start + 2], start), support, logits, outside)
    assert outside.log_sum[0].item() == pytest.approx(math.log(3), abs=1e-6)
    assert not outside.log_sum[1].isfinite()


def test_a_support_in_another_tile_is_left_out_there_only():
    z = torch.tensor([[1.0, 2.0, 3.0]])
    logits = torch.full((1, 3), -torch.inf)
    outside = Outside.empty(logits, 1, entropy=False)
    fold_support(tile_of(z, 10), Support.of(torch.tensor([[2, 11, 13]])), logits, outside)
    assert logits.tolist() == [[-math.inf, 2.0, -math.inf]]
    assert outside.log_sum.item() == pytest.approx(math.log(math.exp(1) + math.exp(3)), rel=1e-6)


def test_no_digit_is_lost_to_what_is_left_out():
    """A sum of everything less the support would leave 0 of it in float32."""
    z = torch.tensor([[30.0, 0.0, 1.0]])
    logits = torch.zeros(1, 1)
    outside = Outside.empty(logits, 1, entropy=False)
    fold_support(tile_of(z), Support.of(torch.tensor([[0]])), logits, outside)
    assert outside.log_sum.item() == pytest.approx(math.log(1 + math.e), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Gradient


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_is_that_of_autograd(name, with_entropy):
    """Of a weighted sum of the support's logits, the log-sum-exp of all others and their entropy."""
    transform = Transform(**TRANSFORMS[name])
    generator = torch.Generator().manual_seed(0)
    raw = (3 * torch.randn(4, 20, generator=generator, dtype=torch.float64)).requires_grad_()
    ids = torch.tensor([[3, 7, -1], [19, 0, 1], [5, -1, -1], [-1, -1, -1]])
    upstream = torch.randn(4, 3, generator=generator, dtype=torch.float64).masked_fill(ids < 0, 0)
    to_sum, to_entropy = torch.randn(2, 4, generator=generator, dtype=torch.float64)

    z = plainly(transform, raw)
    inside = torch.zeros(4, 21, dtype=torch.bool).scatter(-1, ids.masked_fill(ids < 0, 20), True)[:, :20]
    rest = z.masked_fill(inside, -torch.inf)
    log_outside = rest.logsumexp(-1)
    within = torch.log_softmax(rest, -1)
    entropy = -(within.exp() * within.masked_fill(inside, 0)).sum(-1)
    on_support = z.gather(-1, ids.clamp(min=0))
    total = (upstream * on_support).sum() + (to_sum * log_outside).sum()
    (expected,) = torch.autograd.grad(total + (to_entropy * entropy).sum() * with_entropy, raw)

    slope = transform.slope(on_support.detach())
    of = SupportGradient(
        log_outside.detach(),
        to_sum,
        upstream * slope,
        entropy.detach() if with_entropy else None,
        to_entropy if with_entropy else None,
    )
    parts = []
    for start in (0, 6, 12):
        columns = slice(start, min(start + 6, 20) if start < 12 else 20)
        tile = Tile(z.detach()[:, columns].clone(), start, columns.stop - start, transform)
        parts.append(gradient(tile, Support.of(ids), of))
    torch.testing.assert_close(torch.cat(parts, -1), expected, rtol=1e-12, atol=1e-13)


def test_the_gradient_on_the_support_is_written_over_the_rest():
    """a is −5e30 here: to add and take it off again would leave nothing of 0.25."""
    tile = tile_of(torch.zeros(1, 3))
    of = SupportGradient(torch.tensor([math.log(2.0)]), torch.tensor([-5e30]), torch.tensor([[0.25]]), None, None)
    assert gradient(tile, Support.of(torch.tensor([[1]])), of)[0].tolist() == pytest.approx([-2.5e30, 0.25, -2.5e30])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_rows_without_a_gradient_get_none(with_entropy):
    """NaN marks them, and they may hold anything."""
    z = torch.tensor([[0.0, 1.0], [math.nan, math.inf]])
    numbers = torch.tensor([1.0, 1.0])
    of = SupportGradient(
        torch.tensor([0.0, math.nan]),
        numbers,
        torch.tensor([[2.0], [math.nan]]),
        *((numbers, numbers) if with_entropy else (None, None)),
    )
    actual = array(gradient(tile_of(z), Support.of(torch.tensor([[0], [0]])), of))
    assert actual[0, 0] == 2.0 and actual[0, 1] != 0
    assert actual[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_excluded_tokens_get_no_gradient(with_entropy):
    z = torch.tensor([[0.0, -math.inf, 1.0]])
    some = torch.ones(1)
    entropy = (some, some) if with_entropy else (None, None)
    of = SupportGradient(torch.logsumexp(z, -1), some, torch.zeros(1, 1), *entropy)
    actual = gradient(tile_of(z), Support.of(torch.tensor([[-1]])), of)
    assert actual.isfinite().all()
    assert actual[0, 1].abs() <= torch.finfo(torch.float32).smallest_normal
    assert actual[0, 0] != 0
