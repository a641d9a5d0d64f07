"""The Triton kernels against the torch code beside them, in the interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.trust_region.kernels.ahead_of_time import run_without_interpreter
from troll.trust_region import head as head_module
from troll.trust_region.head import Head, OwnSupport, log_probs_on_support_from_hidden, top_from_hidden
from troll.trust_region.kernels import VARIABLE, tile, tile_triton
from troll.trust_region.kernels.tile import Outside, TileGradient, Transform
from troll.trust_region.policy import SparsePolicy

# NaN and −inf are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS = {
    "plain": Transform(),
    "temperature": Transform(temperature=0.7),
    "scale": Transform(logit_scale=0.25),
    "softcap": Transform(softcap=8.0),
    "all": Transform(1.3, 1.7, 5.0),
}
FIRST = 1000

#: Of what is in float32: some ulps of logits up to 30, which exponentials turn into relative errors.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
#: What is rounded to the tile's dtype: half an ulp, but the interpreter cuts off where a GPU rounds to bfloat16.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7 + 1e-5, torch.float16: 2.0**-11 + 1e-5}


def products(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0, padding: int = 0) -> Tensor:
    """(rows, width), with `padding` columns between the rows, which nothing may touch."""
    generator = torch.Generator().manual_seed(seed)
    whole = 4 * torch.randn(rows, width + padding, generator=generator)
    whole[:, width:] = torch.nan
    return whole.to(DEVICE, dtype)[:, :width]


def clone(x: Tensor) -> Tensor:
    """A copy with the same strides, rows apart included."""
    return x.as_strided((len(x), x.stride(0)), x.stride()).clone()[:, : x.shape[1]]


def supports(rows: int, slots: int, low: int, high: int, unused: int = 0) -> Tensor:
    """Different ids in [low, high) for every row, in any order, and some unused slots."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([low + torch.randperm(high - low, generator=generator)[:slots] for _ in range(rows)])
    ids[:, slots - unused :] = -1
    return ids.to(DEVICE)


def fold_both(tiles: list[Tensor], transform: Transform, token_ids: Tensor, entropy: bool) -> list[tuple[Any, ...]]:
    """What the torch code and the kernel make of consecutive tiles: on support, maximum, log-sum, weighted sum."""
    results = []
    for functions in (tile, tile_triton):
        # Slices of bigger tensors, as the head passes them.
        on_support = torch.full((len(token_ids) + 2, token_ids.shape[1]), -torch.inf, device=DEVICE)
        outside = Outside.empty(on_support, len(on_support), entropy).rows(slice(1, -1))
        first = FIRST
        for product in tiles:
            functions.fold_support(clone(product), first, transform, token_ids, on_support[1:-1], outside)
            first += product.shape[1]
        assert on_support[[0, -1]].isneginf().all()
        results.append((on_support[1:-1], outside.maximum, outside.log_sum, outside.weighted_sum))
    return results


def assert_folds_agree(results: list[tuple[Any, ...]]) -> None:
    expected, actual = results
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_running_sums_over_tiles(dtype, transform, entropy):
    tiles = [products(3, width, dtype, seed, padding=5) for seed, width in enumerate((2100, 1, 67))]
    token_ids = supports(3, 40, FIRST - 500, FIRST + 2300, unused=3)
    results = fold_both(tiles, TRANSFORMS[transform], token_ids, entropy)
    assert_folds_agree(results)
    whole = torch.cat(tiles, -1)
    inside = (token_ids >= FIRST) & (token_ids < FIRST + whole.shape[1])
    assert 0 < inside.sum() < inside.numel()
    if transform == "plain":  # bit for bit
        expected = whole.gather(1, (token_ids - FIRST).clamp(0, whole.shape[1] - 1)).float()
        assert torch.equal(results[1][0], expected.masked_fill(~inside, -torch.inf))


@pytest.mark.parametrize(("width", "slots"), [(1, 1), (5, 3), (200, 64), (777, 200), (2049, 512)])
@pytest.mark.parametrize("where", ["inside", "outside", "everything"])
def test_any_support(where, width, slots):
    if where == "everything":
        token_ids = torch.arange(FIRST, FIRST + width, device=DEVICE).flip(0).expand(2, -1)
    else:
        slots = min(slots, width)
        low = FIRST if where == "inside" else FIRST - 600
        token_ids = supports(2, slots, low, low + (width if where == "inside" else 600))
    results = fold_both([products(2, width)], TRANSFORMS["temperature"], token_ids, entropy=True)
    assert_folds_agree(results)
    assert (results[1][2] == -torch.inf).all() == (where == "everything" or (slots == width and where == "inside"))
    assert results[1][0].isfinite().all() == (where != "outside")


@pytest.mark.parametrize("first", [0, -5])
def test_unused_slots_are_no_columns(first):
    token_ids = torch.full((2, 3), -1, device=DEVICE)
    on_support = torch.full((2, 3), -torch.inf, device=DEVICE)
    outside = Outside.empty(on_support, 2, False)
    product, row = products(2, 100), torch.zeros(2, device=DEVICE)
    tile_triton.fold_support(clone(product), first, Transform(), token_ids, on_support, outside)
    assert on_support.isneginf().all()
    torch.testing.assert_close(outside.log_sum, product.logsumexp(-1), **TOLERANCE)
    of = TileGradient(row, row, torch.ones(2, 3, device=DEVICE), row, None, None)
    assert not tile_triton.gradient(product, first, Transform(), token_ids, of).any()


def odd_rows(width: int = 300) -> Tensor:
    product = products(8, width)
    product[0] = -torch.inf
    product[1, : width // 2] = -torch.inf
    product[2, 7] = torch.nan
    product[3, width - 1] = torch.nan
    product[4, 8] = torch.inf
    product[5, width - 1] = torch.inf
    product[6, 3] = torch.nan  # in the support, see below
    return product


@pytest.mark.parametrize("transform", ["plain", "softcap"])
@pytest.mark.parametrize("order", [1, -1])
def test_rows_that_are_no_distribution_and_logits_of_minus_infinity(order, transform):
    token_ids = torch.tensor([3, 290, 2, -1]).add(FIRST).masked_fill(torch.tensor([0, 0, 0, 1]).bool(), -1)
    token_ids = token_ids.to(DEVICE).expand(8, -1)
    tiles = [odd_rows(), products(8, 100, seed=1), torch.full((8, 70), -torch.inf, device=DEVICE)][::order]
    results = fold_both(tiles, TRANSFORMS[transform], token_ids, entropy=True)
    for on_support, _, log_sum, weighted in results:
        if order == 1:
            total = torch.logsumexp(torch.cat([on_support, log_sum.unsqueeze(-1)], -1), -1)
            # A cap makes infinite products finite.
            broken = [False, False, True, True, transform == "plain", transform == "plain", True, False]
            assert (~total.isfinite()).tolist() == broken
        whole = log_sum.isfinite()
        assert weighted[whole].isfinite().all()
    (_, _, expected, expected_weighted), (_, _, actual, actual_weighted) = results
    assert torch.equal(actual.isnan() | (actual == torch.inf), expected.isnan() | (expected == torch.inf))
    whole = expected.isfinite()
    torch.testing.assert_close(results[1][0], results[0][0], equal_nan=True, **TOLERANCE)
    torch.testing.assert_close(actual[whole], expected[whole], **TOLERANCE)
    torch.testing.assert_close(actual_weighted[whole], expected_weighted[whole], **TOLERANCE)


def test_tiles_of_minus_infinity_leave_the_sums_alone():
    nothing = torch.full((2, 100), -torch.inf, device=DEVICE)
    token_ids = supports(2, 3, FIRST, FIRST + 100)
    _, (_, maximum, log_sum, weighted) = fold_both([nothing, nothing], Transform(), token_ids, entropy=True)
    assert maximum.isneginf().all() and log_sum.isneginf().all() and not weighted.any()
    _, before = fold_both([products(2, 100)], Transform(), token_ids, entropy=True)
    _, after = fold_both([products(2, 100), nothing], Transform(), token_ids, entropy=True)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_maximum_that_moves_by_hundreds():
    tiles = [products(2, 50) + shift for shift in (-500.0, 0.0, 300.0, -300.0)]
    results = fold_both(tiles, Transform(), supports(2, 3, 0, FIRST), entropy=True)
    assert_folds_agree(results)


def test_softcap_is_accurate_near_zero_and_saturated():
    size = torch.logspace(-7, 2, 250, dtype=torch.float64)
    product = torch.cat([size, -size, torch.zeros(1, dtype=torch.float64)]).float().to(DEVICE).unsqueeze(0)
    token_ids = torch.arange(FIRST, FIRST + product.shape[1], device=DEVICE).unsqueeze(0)
    _, (actual, *_) = fold_both([product], Transform(softcap=4.0), token_ids, entropy=False)
    expected = 4 * torch.tanh(product.double() / 4)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


# The blocks


def blocks_of_both(product: Tensor, width: int, transform: Transform, token_ids: Tensor) -> list[tuple[Tensor, ...]]:
    """Maxima, log-sums, all logits and the sampled one's."""
    results: list[tuple[Tensor, ...]] = []
    columns = torch.arange(product.shape[1], device=DEVICE).expand(len(product), -1)
    for functions in (tile, tile_triton):
        sampled_logit = torch.full((len(product),), 99.0, device=DEVICE)
        logits_at, maxima, log_sums = functions.fold_blocks(
            clone(product), FIRST, width, transform, token_ids, sampled_logit
        )
        results.append((maxima, log_sums, logits_at(columns), sampled_logit))
    return results


@pytest.mark.parametrize("width", [1, 64, 1090, 2048])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(dtype, transform, width):
    whole = -(-width // 64) * 64
    product = products(4, whole, dtype, padding=3)
    product[:, width:] = torch.nan  # undefined memory
    token_ids = torch.tensor([FIRST, FIRST + width - 1, FIRST - 1, FIRST + width], device=DEVICE)
    expected, actual = blocks_of_both(product, width, TRANSFORMS[transform], token_ids)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, **TOLERANCE)
    maxima, _, z, sampled_logit = actual
    # The K blocks contain the K largest only if these are the very same numbers.
    assert torch.equal(maxima, z.unflatten(-1, (-1, 64)).amax(-1))
    assert z[0, 0] == z[1, width - 1] == -torch.inf and (z[:, width:] == -torch.inf).all()
    assert sampled_logit[2] == sampled_logit[3] == 99


@pytest.mark.parametrize("transform", ["plain", "softcap"])
def test_blocks_of_nan_and_infinities(transform):
    product = odd_rows(320)
    token_ids = torch.full((8,), FIRST + 2, device=DEVICE)
    token_ids[2] = FIRST + 7  # the NaN itself
    expected, actual = blocks_of_both(product, 320, TRANSFORMS[transform], token_ids)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE)
    if transform == "plain":
        assert actual[1][0].isneginf().all() and actual[1][3, -1].isnan() and actual[1][5, -1] == torch.inf


# The gradient


def gradients_of_both(product: Tensor, transform: Transform, token_ids: Tensor, entropy: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows, slots = token_ids.shape
    z = transform(product.float().clone())
    log_outside = torch.logsumexp(z, -1).nan_to_num(neginf=0.0)
    upstream = torch.randn(rows, slots + 3, generator=generator).to(DEVICE)
    of = TileGradient(
        log_outside=log_outside,
        outside=-50 * upstream[:, 0],
        on_support=upstream[:, 3:].contiguous(),
        log_total=(log_outside + 0.4).masked_fill(~torch.logsumexp(z, -1).isfinite(), torch.nan),
        entropy=3 + upstream[:, 1] if entropy else None,
        entropy_gradient=upstream[:1, 2].expand(rows) if entropy else None,
    )
    return [f.gradient(clone(product), FIRST, transform, token_ids, of) for f in (tile, tile_triton)]


def assert_gradients_agree(gradients: list[Tensor], dtype: torch.dtype) -> None:
    expected, actual = gradients
    assert actual.dtype == dtype
    # Near the cap 1 − tanh² loses what is small beside 1.
    absolute = 1e-6 * float(expected.abs().amax())
    torch.testing.assert_close(actual.float(), expected, rtol=ROUNDING[dtype], atol=absolute)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient(dtype, transform, entropy):
    product = products(3, 300, dtype, padding=5)
    product[1, 100:] = -torch.inf
    token_ids = supports(3, 40, FIRST - 100, FIRST + 400, unused=3)
    gradients = gradients_of_both(product, TRANSFORMS[transform], token_ids, entropy)
    assert_gradients_agree(gradients, dtype)


@pytest.mark.parametrize(("width", "slots"), [(1, 1), (2, 3), (200, 200), (5000, 300)])
def test_gradient_of_any_support(width, slots):
    token_ids = supports(2, slots, FIRST, FIRST + max(width, slots))
    gradients = gradients_of_both(products(2, width), Transform(), token_ids, entropy=True)
    assert_gradients_agree(gradients, torch.float32)
    at, _, column = tile.entries(token_ids, FIRST, width)
    assert len(at) and torch.equal(gradients[1][at, column], gradients[0][at, column])


@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("entropy", [False, True])
def test_no_gradient_of_rows_that_are_no_distribution(entropy, transform):
    product = odd_rows()
    gradients = gradients_of_both(product, TRANSFORMS[transform], supports(8, 5, FIRST, FIRST + 300), entropy)
    assert_gradients_agree(gradients, torch.float32)
    assert gradients[1].isfinite().all()
    assert not gradients[1][[2, 3, 6]].any() and gradients[1][7].any()


def test_the_gradient_takes_no_other_memory():
    product = products(2, 300, torch.bfloat16)
    row, token_ids = torch.zeros(2, device=DEVICE), supports(2, 3, FIRST, FIRST + 300)
    of = TileGradient(row, row, torch.zeros(2, 3, device=DEVICE), row, None, None)
    assert tile_triton.gradient(product, FIRST, Transform(), token_ids, of) is product


# End to end


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "TOKEN_TILE", 5)
    monkeypatch.setattr(head_module, "CAPTURE_TOKEN_TILE", 4)
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 300)


def head_and_hidden(transform: Transform, dtype: torch.dtype) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 16, generator=generator), torch.randn(1000, 16, generator=generator)
    bias, sampled = torch.randn(1000, generator=generator), torch.randint(1000, (7,), generator=generator)
    hidden[3] *= 8  # nearly deterministic
    return (
        hidden.to(DEVICE, dtype),
        Head(weight.to(DEVICE, dtype), bias.to(DEVICE, dtype), transform),
        sampled.to(DEVICE),
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3, 100])
def test_capture(k, dtype, transform, monkeypatch):
    hidden, head, sampled = head_and_hidden(TRANSFORMS[transform], dtype)
    monkeypatch.setenv(VARIABLE, "torch")
    expected = top_from_hidden(hidden, head, sampled, k)
    keywords: dict[str, Any] = {"top_k": k, "bias": head.bias, **TRANSFORMS[transform]._asdict()}
    policy = SparsePolicy.from_hidden(hidden, head.weight, sampled, **keywords)
    monkeypatch.setenv(VARIABLE, "triton")
    actual = top_from_hidden(hidden, head, sampled, k)
    if transform == "plain":  # otherwise ulps decide between logits that bf16 or the cap leave all but equal
        assert torch.equal(actual.ids, expected.ids)
    for got, want in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    again = SparsePolicy.from_hidden(hidden, head.weight, sampled, **keywords)
    torch.testing.assert_close(again.log_probs, policy.log_probs, **TOLERANCE)
    torch.testing.assert_close(again.tail_log_prob, policy.tail_log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("own_support", [False, True])
@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients(dtype, transform, own_support, monkeypatch):
    hidden, head, sampled = head_and_hidden(TRANSFORMS[transform], dtype)
    assert head.bias is not None
    leaves = [x.clone().requires_grad_() for x in (hidden, head.weight, head.bias)]
    head = Head(leaves[1], leaves[2], head.transform)
    token_ids = supports(7, 9, 0, 1000, unused=2)
    token_ids[:, 0] = sampled
    results = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv(VARIABLE, kernels)
        own = OwnSupport(sampled, 1e-3) if own_support else None
        out = log_probs_on_support_from_hidden(leaves[0], head, token_ids, own_support=own, entropy=True)
        assert out.entropy is not None
        values = (out.log_probs, out.tail_log_prob, out.entropy)
        used = [(x * torch.linspace(-1, 1, x.numel(), device=DEVICE).view_as(x))[x.isfinite()].sum() for x in values]
        gradients = torch.autograd.grad(used[0] + used[1] + 0.1 * used[2], leaves)
        results.append((out.token_ids, values, gradients))
    (ids, values, gradients), (actual_ids, actual_values, actual_gradients) = results
    assert torch.equal(actual_ids >= 0, ids >= 0)
    if transform == "plain":
        assert torch.equal(actual_ids, ids)
    for got, want in zip(actual_values, values, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    # Sums of many terms, each rounded to the tile's dtype by the kernel alone.
    for got, want in zip(actual_gradients, gradients, strict=True):
        assert got.isfinite().all()
        error = (got - want).float().norm() / want.float().norm()
        assert error < ROUNDING[dtype]


@pytest.mark.usefixtures("small_tiles")
def test_broken_rows_of_a_head(monkeypatch):
    hidden, head, _ = head_and_hidden(Transform(), torch.float32)
    hidden[5] = torch.nan
    hidden.requires_grad_()
    monkeypatch.setenv(VARIABLE, "triton")
    out = log_probs_on_support_from_hidden(hidden, head, supports(7, 9, 0, 1000), entropy=True)
    assert out.entropy is not None and out.entropy.isnan().nonzero().tolist() == [[5]]
    (gradient,) = torch.autograd.grad(out.log_probs[:, 0].nansum() + out.entropy.nansum(), hidden)
    assert gradient.isfinite().all() and gradient.any(-1).tolist() == [row != 5 for row in range(7)]


def test_no_tokens(monkeypatch):
    hidden, head, sampled = head_and_hidden(Transform(), torch.float32)
    monkeypatch.setenv(VARIABLE, "triton")
    assert top_from_hidden(hidden[:0], head, sampled[:0], 4).ids.shape == (0, 4)
    out = log_probs_on_support_from_hidden(hidden[:0], head, sampled[:0].unsqueeze(-1))
    assert out.log_probs.shape == (0, 1)


def test_other_names_are_refused(monkeypatch):
    hidden, head, sampled = head_and_hidden(Transform(), torch.float32)
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(ValueError, match="TROLL_KERNELS must be torch or triton, got 'nonsense'"):
        top_from_hidden(hidden, head, sampled, 4)


@pytest.mark.parametrize("target", ["cuda", "hip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_compile(target, dtype, tmp_path: Path):
    lines = run_without_interpreter("tests.trust_region.kernels.compile_tile", target, dtype, cache=tmp_path)
    names = [line.split()[0] for line in lines if int(line.split()[1]) > 1000]
    assert names.count("_fold_support_kernel") == names.count("_gradient_kernel") == 4
    assert names.count("_fold_blocks_kernel") == names.count("_gather_kernel") == 2
