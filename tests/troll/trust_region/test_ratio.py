"""The ratio q(o)/p(o), as DESIGN.md has it: 1 for equal policies, continuous at the bound, and the same in every path.

Its agreement with the reference on random policies is tested in test_step.py, and over slices of a vocabulary in
reading/test_vocabulary.py.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import troll
from tests.tolerance import within
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import FAMILIES, array, pairs, some, tensor
from troll import LMHead, Logits, PackedPolicy, SparsePolicy, TrustRegionStep
from troll.trust_region.reading.source import LogitsSource

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.usefixtures("small_tiles")


def sampled_tokens(logits: Tensor) -> Tensor:
    """A third each: the likeliest tokens, any tokens, and those of the smallest probability that is not 0."""
    generator = torch.Generator().manual_seed(11)
    anything = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
    smallest = logits.masked_fill(logits == -torch.inf, torch.inf).argmin(-1)
    which = torch.arange(anything.numel()).view(anything.shape) % 3
    return torch.where(which == 0, logits.argmax(-1), torch.where(which == 1, anything, smallest))


# Equal policies, on one path

ROWS, WIDTH, SIZE = 24, 8, 130


class Network:
    """Hidden states (rows, H) and a head (V, H) that give rather flat or rather peaked logits, far from 0 or not."""

    def __init__(self, spread: float, shift: float, dtype: torch.dtype, size: int = SIZE, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        hidden[:, 0] = 1.0
        weight = spread / WIDTH**0.5 * torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        weight[:, 0] = shift
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.logits = self.hidden @ self.weight.t()
        self.token_ids = sampled_tokens(self.logits.double())


def apart(x: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Rows that lie among as many others, and where."""
    others = torch.full_like(x, 7.0)
    return torch.stack([others, x], 1).flatten(0, 1), 2 * torch.arange(len(x)) + 1


SOURCES: dict[str, Callable[[Network], LogitsSource | Tensor]] = {
    "tensor": lambda n: n.logits,
    "strided": lambda n: torch.stack([n.logits, n.logits + 1], 1).view(2, ROWS // 2, 2, -1)[:, :, 0].flatten(0, 1),
    "logits[:, :-1]": lambda n: torch.cat([n.logits, n.logits[:1]])[None, :-1][0],
    "rows of logits": lambda n: Logits(apart(n.logits)[0], rows=apart(n.logits)[1]),
    "donated": lambda n: Logits(n.logits.clone(), donate=True),
    "transformed logits": lambda n: Logits(n.logits, temperature=0.7, scale=1.3, softcap=200.0),
    "head": lambda n: LMHead(n.hidden, n.weight),
    "rows of a head": lambda n: LMHead(apart(n.hidden)[0], n.weight, rows=apart(n.hidden)[1]),
    "head with a bias": lambda n: LMHead(n.hidden, n.weight, n.weight[:, 1]),
    "transformed head": lambda n: LMHead(n.hidden, n.weight, temperature=0.7, scale=1.3, softcap=200.0),
}


def assert_ratio_one(step: TrustRegionStep, old: SparsePolicy, log_total: Tensor) -> None:
    """Up to DESIGN's bound, 4 · 2⁻²³ · max(1, |logsumexp|, |log p(o)|) in float32, and 2⁻⁵² in float64.

    That is a promise, of which up to 0.4 was seen; so it is no tolerance of the tests'.
    """
    assert step.log_ratio.dtype == old.log_probs.dtype
    unit = torch.finfo(step.log_ratio.dtype).eps
    size = torch.maximum(log_total.abs().double(), old.log_prob.abs().double()).clamp(min=1)
    assert (step.log_ratio.abs().double() <= 4 * unit * size).all()
    assert not step.projected.any()


def log_total(name: str, network: Network) -> Tensor:
    z = network.hidden.double() @ network.weight.double().t()
    z = z + (network.weight[:, 1].double() if name == "head with a bias" else 0.0)
    if "transformed" in name:
        z = 200 * torch.tanh(1.3 * z / 200) / 0.7
    return z.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("threshold", [0.0, 1e-5])
def test_equal_policies_have_ratio_one(name, dtype, threshold):
    smallest = 0.0
    for spread in (0.1, 1.0, 8.0, 30.0):
        for shift in (0.0, 60.0, -200.0):
            network = Network(spread, shift, dtype)
            source = SOURCES[name](network)
            old = troll.capture(source, network.token_ids, top_k=8, mass_threshold=threshold)
            step = troll.trust_region_step(source, old)
            assert_ratio_one(step, old, log_total(name, network))
            smallest = min(smallest, old.log_prob.min().item())
    assert smallest < -60, "tokens far below the floor too"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tensor", "head"])
def test_equal_policies_have_ratio_one_however_they_were_read(name, dtype):
    """Outcomes read before; a capture of these; packed, indexed and put together again."""
    for spread in (0.1, 1.0, 8.0, 30.0):
        network = Network(spread, 60.0, dtype)
        source, total = SOURCES[name](network), log_total(name, network)
        old = troll.capture(source, network.token_ids, top_k=8)
        new = troll.log_probs_at(source, old.token_ids)
        assert_ratio_one(troll.trust_region_step(new, old), old, total)

        # What such a capture drops is float32, while a step reads it from the tiles of a product in half precision.
        dropping = name == "tensor" or dtype != torch.bfloat16
        own = troll.capture(new, network.token_ids, top_k=4 if dropping else 8, mass_threshold=0.0)
        assert_ratio_one(troll.trust_region_step(source, own), own, total)

        carried = [PackedPolicy.of(old).unpack(), SparsePolicy.cat([old[:5], old[5:]]), old.view((4, 6)).view((ROWS,))]
        for policy in carried:
            again = troll.trust_region_step(source, policy)
            assert torch.equal(again.log_ratio, troll.trust_region_step(source, old).log_ratio)
            assert_ratio_one(again, old, total)


@pytest.mark.parametrize("family", FAMILIES)
def test_near_deterministic_and_degenerate_policies_have_ratio_one(family):
    for size in (1, 2, 3, 33):
        logits = tensor(pairs(family, 60, size)[0])
        token_ids = sampled_tokens(logits)
        for dtype in (torch.float64, torch.float32):
            z = logits.to(dtype)
            old = troll.capture(z, token_ids, top_k=8)
            step = troll.trust_region_step(z, old)
            excluded = old.log_prob == -torch.inf  # any token, in "masked": no ratio
            assert not step.log_ratio[excluded].any()
            assert_ratio_one(some(step, ~excluded), old[~excluded], z.double().logsumexp(-1)[~excluded])


LOGIT = st.one_of(st.floats(-100, 100), st.sampled_from([0.0, 1.0, -27.6, -28.0, -300.0, -math.inf]))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    row=st.lists(LOGIT, min_size=1, max_size=12),
    top_k=st.integers(1, 13),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.5]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_policy_has_ratio_one_to_itself(row, top_k, threshold, dtype, data):
    z = torch.tensor([row], dtype=torch.float64).to(dtype)
    assume(reference.is_finite_row(array(z[0])))
    allowed = [v for v in range(len(row)) if z[0, v] > -torch.inf]
    token_ids = torch.tensor([data.draw(st.sampled_from(allowed))])
    old = troll.capture(z, token_ids, top_k=top_k, mass_threshold=threshold)
    leaf = z.clone().requires_grad_()
    step = troll.trust_region_step(leaf, old)
    assert_ratio_one(step, old, z.double().logsumexp(-1))
    (gradient,) = torch.autograd.grad(step.log_ratio.sum(), leaf)
    assert gradient.isfinite().all()


# Equal policies, on two paths


def two_paths(dtype: torch.dtype) -> tuple[dict[str, LogitsSource], Tensor, Tensor]:
    """Ways to the same logits, which differ by the product's rounding; sampled tokens; Σ |h_i| |w_i|, (N, V)."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, 64, generator=generator).to(dtype)
    weight = (torch.randn(1000, 64, generator=generator) / 3).to(dtype)
    logits = hidden @ weight.t()
    wide, rows = apart(hidden)
    paths: dict[str, LogitsSource] = {
        "logits": Logits(logits),
        "head": LMHead(hidden, weight),
        "rows of a head": LMHead(wide, weight, rows=rows),
    }
    if dtype == torch.float32:
        # The same sums in reverse order.
        paths["head, reversed"] = LMHead(hidden.flip(-1), weight.flip(-1))
        paths["logits, in float64 first"] = Logits((hidden.double() @ weight.double().t()).float())
    return paths, sampled_tokens(logits.double()), hidden.abs().double() @ weight.abs().double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_capture_and_step_on_different_paths_differ_by_the_products_rounding(dtype):
    """The ratio is 1 up to what the two products may differ by, of o's logit and of any other in the total."""
    paths, token_ids, size = two_paths(dtype)
    # A float32 sum of H products is off by at most H · 2⁻²⁴ · |h| |w|, on either path.
    error = 2 * 64 * 2.0**-24 * size
    if dtype != torch.float32:
        # A logit in half precision is rounded once more, by at most a unit in the last place.
        exact = paths["head"].tensors[0].double() @ paths["head"].tensors[1].double().t()  # type: ignore[union-attr]
        error = error + exact.abs() * torch.finfo(dtype).eps
    limit = error.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) + error.amax(-1) + 8 * 2.0**-23 * 40
    largest = 0.0
    for before in paths.values():
        old = troll.capture(before, token_ids, top_k=16)
        for now in paths.values():
            step = troll.trust_region_step(now, old)
            assert (step.log_ratio.abs() <= within(1) * limit).all()
            assert not step.projected.any()
            largest = max(largest, (step.log_ratio.abs() / limit).max().item())
    assert largest > 0.001, "the paths do differ"


# DESIGN's formula, for sampled tokens of any probability

LOG_PROBS = (0.0, -0.5, -5.0, -20.0, -26.0, -27.0, -28.0, -30.0, -35.0, -60.0, -100.0)


def at(log_p: float, move: float, others: tuple[float, float], size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Old and new logits with log p(o) = log_p of token 0, and its logit moved; the second token's as `others` say."""
    old = np.zeros(size)
    old[1:] = -1.0 - 0.3 * np.arange(size - 1)
    old[1] = others[0]
    rest = reference.log_sum_exp(old[1:])
    # log p(o) = z − log(e^z + e^rest): near 0, with the rest far below it.
    old[0] = rest + 35.0 if log_p == 0.0 else rest + log_p - math.log(-math.expm1(log_p))
    new = old.copy()
    new[0] += move
    new[1] = others[1]
    return old, new


def by(path: str, z: Tensor, old: SparsePolicy) -> tuple[Any, SparsePolicy]:
    """The logits z of a new policy, and the old one, as they come by one of the paths."""
    if path == "head":
        return LMHead(z, torch.eye(z.shape[-1], dtype=z.dtype)), old
    if path == "outcomes":
        return troll.log_probs_at(z, old.token_ids), old
    return z, PackedPolicy.of(old).unpack() if path == "packed" else old


def moves(log_p: float) -> list[tuple[float, tuple[float, float]]]:
    """How o and the others move: not far, and out of the ball; or o from or to −100."""
    found = [(0.5, (0.0, 0.1)), (-1.6, (-3.0, 2.0)), (2.0, (0.0, -3.0)), (-100.0 - log_p, (-3.0, 2.0))]
    return found if log_p > -90 else [*found, (70.0, (0.0, -3.0))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("path", ["logits", "head", "outcomes", "packed"])
@pytest.mark.parametrize("kl_bound", [0.05, math.inf])
@pytest.mark.parametrize("log_p", LOG_PROBS)
def test_every_path_is_the_formula_on_dense_outcomes(log_p, kl_bound, path, dtype):
    """K = V, gradients included."""
    for move, others in moves(log_p):
        old_row, new_row = (row.astype(np.float32).astype(np.float64) for row in at(log_p, move, others))
        row = reference.capture(old_row, 0, 6, 0.0)
        assert row.log_prob == pytest.approx(log_p, abs=1e-4)  # its logits are rounded to float32
        expected = reference.step(new_row, row, kl_bound)
        old = troll.capture(tensor(old_row[None], dtype), torch.tensor([0]), mass_threshold=0.0)
        leaf = tensor(new_row[None], dtype).requires_grad_()
        step = troll.trust_region_step(*by(path, leaf, old), kl_bound)
        assert bool(step.projected) == expected.projected
        if dtype == torch.float64:
            # τ is known to 1e-11 · KL/(τ σ²) or so; log ratios here are of up to 100.
            assert old.log_prob.item() == pytest.approx(row.log_prob, abs=1e-12)
            assert step.log_ratio.item() == pytest.approx(expected.log_ratio, rel=1e-8, abs=1e-8)
            rtol, atol = 1e-6, 1e-6
        else:
            assert abs(step.log_ratio.item() - expected.log_ratio) <= within(float32_error(new_row, row, expected))
            rtol, atol = 2e-3, 2e-4
        (gradient,) = torch.autograd.grad(step.log_ratio.sum(), leaf)
        np.testing.assert_allclose(
            array(gradient[0]), expected.log_ratio_gradient, rtol=within(rtol), atol=within(atol)
        )


@pytest.mark.parametrize("log_p", LOG_PROBS[1:])
def test_a_tail_that_moves_as_one_is_the_formula_on_dense_outcomes(log_p):
    """The bucket is then no approximation: eight tokens outside the support have equal s."""
    for move, others in moves(log_p):
        old_row, new_row = (np.append(row, [-6.0, -6.5] * 4) for row in at(log_p, move, others))
        new_row[6:] += 0.8
        dense = reference.step(new_row, reference.capture(old_row, 0, 14, 0.0), 0.05)
        old = troll.capture(tensor(old_row[None]), torch.tensor([0]), top_k=6, mass_threshold=0.0)
        assert sorted(old.token_ids[0].tolist()) == list(range(6))
        leaf = tensor(new_row[None]).requires_grad_()
        step = troll.trust_region_step(leaf, old, 0.05)
        # One floor for eight tokens, or one each: 1e-11 of the mass.
        assert step.log_ratio.item() == pytest.approx(dense.log_ratio, rel=1e-8, abs=1e-8)
        (gradient,) = torch.autograd.grad(step.log_ratio.sum(), leaf)
        np.testing.assert_allclose(array(gradient[0]), dense.log_ratio_gradient, rtol=within(1e-6), atol=within(1e-6))


def float32_error(new_row: np.ndarray, row: reference.OldRow, expected: reference.StepRow) -> float:
    """Eight roundings of the numbers on the way; and where projected, what an error of 1e-4 · ε in KL moves.

    (The search stops at 2e-5 · ε, and KL itself is rounded.)
    """
    largest = max(1.0, abs(row.log_prob), abs(expected.log_prob), float(np.abs(new_row).max()))
    rounding = 8 * 2.0**-23 * largest
    if not expected.projected:
        return rounding
    outcomes = reference.bucket_outcomes(new_row, row)
    solution = reference.solve(outcomes.log_old, outcomes.log_new, 0.05)
    mean, variance = reference.moments(solution.log_q, outcomes.log_new - outcomes.log_old)
    slope = abs(expected.log_prob - row.log_prob - mean) / (solution.tau * variance)
    return rounding + slope * 1e-4 * 0.05


# Continuity at the bound


@pytest.mark.parametrize("log_p", LOG_PROBS[1:])
@pytest.mark.parametrize("move", [0.5, -1.6, 10.0, -10.0])
def test_the_ratio_is_continuous_at_the_bound(log_p, move):
    """Just inside and just outside, the ratio is the same to first order: for a token below the floor too."""
    old_row, new_row = at(log_p, move, (0.0, 1.0))
    row = reference.capture(old_row, 0, 6, 0.0)
    old = troll.capture(tensor(old_row[None]), torch.tensor([0]), mass_threshold=0.0)
    z = tensor(new_row[None])
    kl = troll.trust_region_step(z, old, math.inf).kl_before.item()
    outcomes = reference.bucket_outcomes(new_row, row)
    s = outcomes.log_new - outcomes.log_old
    mean, variance = reference.moments(outcomes.log_new, s)
    for dtype, step_size in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        policy = old.to(dtype)
        inside = troll.trust_region_step(z.to(dtype), policy, kl * (1 + step_size))
        outside = troll.trust_region_step(z.to(dtype), policy, kl * (1 - step_size))
        assert (bool(inside.projected), bool(outside.projected)) == (False, True)
        # ∂(log ratio)/∂ε = (s_o − μ)/(τ σ²) at τ = 1, with o's own s: raw.
        own = inside.log_ratio.item()
        first_order = abs(own - mean) / variance * kl * step_size
        rounding = 8 * torch.finfo(dtype).eps * max(1.0, abs(log_p - 10)) * (1 + abs(own - mean) / variance)
        difference = abs(outside.log_ratio.item() - inside.log_ratio.item())
        assert difference <= 1.2 * first_order + within(3 * rounding)
        assert 1.2 * first_order + 3 * rounding < 0.02 * max(1.0, abs(own)), "else nothing is said"


# What was wrong


@pytest.mark.parametrize("path", ["logits", "head", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("log_p", "wrong"), [(-30.0, 15.33), (-35.0, 2276.0), (-60.0, 1.639e14)])
def test_a_projected_token_with_a_sampled_token_below_the_floor(log_p, wrong, dtype, path):
    """Once the ratio was floored q(o) over raw p(o): 15, 2,275 and 1.6e14 here, for a token that became less likely."""
    z = log_p + math.log1p(math.exp(-3.0))  # next to e^log_p this total is exact
    old_row, new_row = np.array([0.0, -3.0, z]), np.array([0.0, 2.0, z - 1.6])
    row = reference.capture(old_row, 2, 3, 0.0)
    outcomes = reference.bucket_outcomes(new_row, row)
    solution = reference.solve(outcomes.log_old, outcomes.log_new, 0.05)
    assert math.exp(solution.log_q[row.slot] - row.log_prob) == pytest.approx(wrong, rel=0.01)

    old = troll.capture(tensor(old_row[None], dtype), torch.tensor([2]), mass_threshold=0.0)
    source, old = by(path, tensor(new_row[None], dtype), old)
    step = troll.trust_region_step(source, old)
    assert bool(step.projected)
    assert 0.6 < step.log_ratio.exp().item() < 0.7
    expected = reference.step(new_row, row, 0.05)
    tolerance = 1e-8 if dtype == torch.float64 else float32_error(new_row, row, expected)
    assert step.log_ratio.item() == pytest.approx(expected.log_ratio, abs=tolerance)
