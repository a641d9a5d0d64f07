"""The kernels that read a tile and write its gradient, against the torch code next to them in float64."""

import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from tests.tolerance import rounding, within
from tests.troll.trust_region.reading.tiles import (
    DEVICE,
    EXPONENTIAL,
    FIRST,
    LOGIT,
    Folded,
    Made,
    made,
    random_values,
    some_ids,
    unchanged,
)
from troll.trust_region.reading.tiles import Support, TailSums, Tile, Transform, Upstream, rows_of
from troll.trust_region.reading.tiles_triton import TritonTile


def fold_by(tiles: Sequence[Tile], support: Support, entropy: bool, dtype: torch.dtype) -> Folded:
    """Logits on the support, and sums, after consecutive tiles; in slices of tensors, as a reading passes them."""
    rows, slots = support.ids.shape
    logits = torch.full((rows + 2, slots), -torch.inf, device=DEVICE, dtype=dtype)
    outside = TailSums.empty(logits, entropy)
    within = slice(1, -1)
    for tile in tiles:
        tile.read(support, logits[within], rows_of(outside, within))
    assert logits[[0, -1]].isneginf().all() and not outside.exp_sum[[0, -1]].any()
    return logits[within], rows_of(outside, within)


def fold_both(parts: list[Made], support: Support, entropy: bool = True) -> tuple[Folded, Folded]:
    memory = [part.memory.clone() for part in parts]
    actual = fold_by([part.tile for part in parts], support, entropy, torch.float32)
    assert all(unchanged(before, part.memory) for before, part in zip(memory, parts, strict=True))
    return actual, fold_by([part.for_torch() for part in parts], support, entropy, torch.float64)


def test_read_leaves_out_columns_at_chunk_edges():
    """Each is left out where its chunk comes by, and in no other."""
    columns = torch.tensor([0, 1, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 4999])
    values = torch.zeros(2, 5000, device=DEVICE)
    values[:, columns] = 100.0  # would dwarf the rest
    ids = (FIRST + columns).to(DEVICE).expand(2, -1)
    (_, outside), _ = fold_both([made(values)], Support.from_ids(ids))
    assert outside.maximum.tolist() == [0, 0] and outside.exp_sum.tolist() == [4990, 4990]


@pytest.mark.parametrize("first", [0, -5])
def test_read_ignores_unused_slots(first):
    support = Support.from_ids(torch.full((2, 3), -1, device=DEVICE))
    part = made(random_values(2, 100), first=first)
    (logits, outside), _ = fold_both([part], support)
    assert logits.isneginf().all()
    torch.testing.assert_close(outside.log_sum.double(), part.logits.logsumexp(-1), rtol=0, atol=EXPONENTIAL)
    row = torch.zeros(2, device=DEVICE)
    upstream = Upstream(row, row, torch.ones(2, 3, device=DEVICE), None, None)
    assert not part.tile.gradient(support, upstream).any()


def test_read_follows_maximum_that_moves_by_hundreds():
    parts = [made(random_values(2, 50) + shift, first=FIRST + 50 * i) for i, shift in enumerate((-500.0, 0, 300, -300))]
    actual, expected = fold_both(parts, Support.from_ids(some_ids(2, 3, 0, FIRST)))
    (_, got), (_, want) = actual, expected
    # Logits of 300 are known to 300 · 2⁻²⁴ · 3, with which a sum of exponentials is off.
    torch.testing.assert_close(got.log_sum.double(), want.log_sum, rtol=3 * 2.0**-24, atol=0)


def test_read_softcap_near_zero_and_saturated():
    size = torch.logspace(-7, 2, 250, dtype=torch.float64)
    values = torch.cat([size, -size, torch.zeros(1, dtype=torch.float64)]).float().to(DEVICE).unsqueeze(0)
    part = made(values, Transform(softcap=4.0))
    ids = torch.arange(FIRST, FIRST + values.shape[1], device=DEVICE).unsqueeze(0)
    (logits, _), _ = fold_both([part], Support.from_ids(ids))
    torch.testing.assert_close(logits.double(), part.logits, rtol=LOGIT, atol=0)


def gradient_of(part: Made, slots: int, entropy: bool) -> Upstream:
    """What a reading would pass, with random numbers for what arrives from above."""
    rows = len(part.logits)
    generator = torch.Generator().manual_seed(2)
    total = torch.logsumexp(part.logits, -1)
    arriving = torch.randn(rows, slots + 3, generator=generator).to(DEVICE)
    return Upstream(
        log_outside=torch.where(total == -torch.inf, 0, total).where(total < torch.inf, math.nan).float(),
        outside=-50 * arriving[:, 0],
        on_support=arriving[:, 3:].contiguous(),
        tail_entropy=3 + arriving[:, 1] if entropy else None,
        tail_entropy_gradient=arriving[:1, 2].expand(rows) if entropy else None,
    )


def in_double(upstream: Upstream) -> Upstream:
    return Upstream(*(None if x is None else x.double() for x in upstream))  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "out_form"), [("rows", "some"), ("some", "batch"), ("batch", "rows")])
def test_write_gradient_leaves_logits(form, out_form):
    part, out = made(random_values(3, 300), Transform(1.3, 1.7, 5.0), form), made(torch.zeros(3, 300), form=out_form)
    support = Support.from_ids(some_ids(3, 40, FIRST - 100, FIRST + 400))
    upstream, before = gradient_of(part, 40, entropy=True), part.memory.clone()
    expected = part.for_torch().gradient(support, in_double(upstream))
    part.tile.write_gradient(support, upstream, out.source)
    assert unchanged(before, part.memory)
    # Near the cap 1 − tanh² loses what is small next to 1.
    absolute = LOGIT * float(expected.abs().amax()) + 2.0**-24
    torch.testing.assert_close(out.values().double(), expected, rtol=EXPONENTIAL, atol=absolute)
    assert out.memory.isnan().sum() == out.memory.numel() - 900  # nothing else was written


def test_clear_zeroes_named_rows_only():
    values = torch.randn(5, 4100, device=DEVICE).to(torch.bfloat16)
    before, rows = values.clone(), torch.tensor([True, False, False, True, False], device=DEVICE)
    TritonTile.clear(values, rows)
    assert (values[rows] == 0).all()
    assert torch.equal(values[~rows], before[~rows])


gathered_products = TritonTile.gathered_products


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize(("slots", "width", "bias"), [(1, 16, False), (20, 300, True)])
def test_gathered_products_agree_with_torch(slots, width, bias, dtype, weight_dtype):
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


def test_gathered_products_take_any_strides():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(16, 3, generator=generator), torch.randn(16, 50, generator=generator)
    ids = some_ids(3, 4, 0, 50)
    transposed = gathered_products(hidden.to(DEVICE).t(), weight.to(DEVICE).t(), None, ids, 0)
    contiguous = gathered_products(hidden.to(DEVICE).t().contiguous(), weight.to(DEVICE).t().contiguous(), None, ids, 0)
    # A compiler may order 16 summands as it loads them.
    size = gathered_products(hidden.to(DEVICE).t().abs(), weight.to(DEVICE).t().abs(), None, ids, 0)
    assert ((transposed - contiguous).abs() <= within(rounding(16)) * size).all()


def test_gathered_products_skip_unused_weights():
    weight = torch.full((4, 16), torch.nan, device=DEVICE)
    weight[2] = 1.0
    ids = torch.tensor([[-1, 2, -1]], device=DEVICE)
    assert gathered_products(torch.ones(1, 16, device=DEVICE), weight, None, ids, 0).tolist() == [
        [-torch.inf, 16.0, -torch.inf]
    ]
