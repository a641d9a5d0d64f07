"""The Triton kernel against the torch code beside it, in the interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

import troll
from tests.trust_region.cases import FAMILIES, array, bounds, pairs, tensor, true_kl
from tests.trust_region.kernels.ahead_of_time import run_without_interpreter
from troll.trust_region import objective
from troll.trust_region.kernels import VARIABLE, token, token_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: What both paths give per token; the entropy is the head's.
FIELDS = [field.name for field in dataclasses.fields(token.TrustRegionStep) if field.name != "entropy"]
DIFFERENTIABLE = ("log_probs", "new_log_probs", "regression")


class Outcomes(NamedTuple):
    """What both implementations take, in float32."""

    new: Tensor
    old: Tensor
    present: Tensor
    slot: Tensor
    kl_bound: Tensor


def on_device(outcomes: Outcomes) -> Outcomes:
    return Outcomes(*(x.to(DEVICE) for x in outcomes))


def log_probs(logits: np.ndarray) -> Tensor:
    return torch.log_softmax(tensor(logits), dim=-1).float()


def outcomes_of(family: str, rows: int, size: int, absent: bool = True, seed: int = 0) -> Outcomes:
    """Pairs of a family; half of them without some outcomes, the tail among these."""
    old, new = (log_probs(logits) for logits in pairs(family, rows, size, seed))
    rng = np.random.default_rng(seed)
    slot = rng.integers(size, size=rows)
    present = np.ones((rows, size), dtype=bool)
    if absent:
        present[::2] = rng.random((len(present[::2]), size)) < 0.7
        present[::4, -1] = False
        present[np.arange(rows), slot] = True
    # Absent outcomes may hold anything, and usually −inf.
    new[~torch.tensor(present)], old[~torch.tensor(present)] = -math.inf, -math.inf
    kl_bound = tensor(bounds(rows, seed=seed), torch.float32)
    kl_bound[::11] = math.inf
    return on_device(Outcomes(new, old, torch.tensor(present), torch.tensor(slot), kl_bound))


def in_double(outcomes: Outcomes) -> Outcomes:
    return Outcomes(*(x.double() if x.is_floating_point() else x for x in outcomes))


def values_of(step: token.TrustRegionStep) -> list[Tensor]:
    return [getattr(step, name) for name in FIELDS]


def by_torch(outcomes: Outcomes, weights: dict[str, Tensor] | None = None) -> tuple[token.TrustRegionStep, Tensor]:
    """The step, and the gradient of its weighted outputs (of their sum, unless there are weights)."""
    leaf = outcomes.new.detach().clone().requires_grad_()
    return differentiate(token.trust_region_step(leaf, *outcomes[1:], "newton"), leaf, weights)


def by_triton(outcomes: Outcomes, weights: dict[str, Tensor] | None = None) -> tuple[token.TrustRegionStep, Tensor]:
    leaf = outcomes.new.detach().clone().requires_grad_()
    return differentiate(token_triton.trust_region_step(leaf, *outcomes[1:]), leaf, weights)


def differentiate(step: token.TrustRegionStep, leaf: Tensor, weights: dict[str, Tensor] | None) -> tuple[Any, Tensor]:
    weights = weights or {name: torch.ones_like(step.log_probs) for name in DIFFERENTIABLE}
    outputs = [getattr(step, name) for name in weights]
    (gradient,) = torch.autograd.grad(outputs, leaf, [w.to(leaf) for w in weights.values()])
    return step, gradient


def assert_close(actual: Tensor | None, expected: Tensor | None, name: str = "gradient", atol: float = 5e-5) -> None:
    """Where KL(τ) is flat, log q is known less well than the bound is met."""
    assert actual is not None and expected is not None
    np.testing.assert_allclose(array(actual), array(expected), rtol=5e-5, atol=atol, err_msg=name)


def assert_agree(ours: token.TrustRegionStep, theirs: token.TrustRegionStep) -> None:
    for name in FIELDS:
        actual, expected = getattr(ours, name), getattr(theirs, name)
        assert actual.shape == expected.shape, name
        if name == "projected":
            assert actual.dtype == torch.bool
            assert torch.equal(actual, expected)
        else:
            assert actual.dtype == torch.float32, name
            assert_close(actual, expected, name)


@pytest.mark.parametrize("size", [7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_torch(family, size):
    """With the torch code, in both precisions, values and the gradient of all three outputs together."""
    outcomes = outcomes_of(family, 16, size)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(16, generator=generator) for name in DIFFERENTIABLE}
    ours, gradient = by_triton(outcomes, weights)
    for theirs, expected in (by_torch(in_double(outcomes), weights), by_torch(outcomes, weights)):
        assert_agree(ours, theirs)
        # The torch code rounds s − μ once more than the kernel.
        assert_close(gradient, expected, atol=5e-5 if expected.dtype == torch.float64 else 3e-4)
    assert gradient[~outcomes.present].abs().max() == 0
    if family != "nearly_equal":
        assert 0 < ours.projected.sum() < 16
    else:
        assert not ours.projected.all()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_of_one_output(name):
    for family in ("peaked", "masked"):
        outcomes = outcomes_of(family, 16, 5, seed=1)
        weights = {name: torch.linspace(-2, 2, 16)}
        _, gradient = by_triton(outcomes, weights)
        _, expected = by_torch(in_double(outcomes), weights)
        assert_close(gradient, expected)
        assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("family", ["peaked", "nearly_disjoint", "near_deterministic", "masked"])
def test_the_bound_is_met_whatever_is_sampled(family):
    """To the promise for float32, judged in float64: the whole of q is read by sampling every outcome."""
    rows, size = 12, 5
    old, new = pairs(family, rows, size, seed=2)
    kl_bound = bounds(rows, seed=3)
    new_log_probs, old_log_probs = (log_probs(logits).repeat_interleave(size, 0) for logits in (new, old))
    outcomes = Outcomes(
        new_log_probs,
        old_log_probs,
        torch.ones(rows * size, size, dtype=torch.bool),
        torch.arange(size).repeat(rows),
        tensor(kl_bound, torch.float32).repeat_interleave(size),
    )
    step, _ = by_triton(on_device(outcomes))
    projected = array(step.projected).reshape(rows, size)
    assert (projected == projected[:, :1]).all() and projected.any()
    log_q = array(step.log_probs).reshape(rows, size)
    np.testing.assert_allclose(np.exp(log_q[projected[:, 0]]).sum(-1), 1, atol=1e-5)
    kl = true_kl(log_q, old)[projected[:, 0]]
    np.testing.assert_allclose(kl, kl_bound[projected[:, 0]], rtol=1e-3)
    np.testing.assert_allclose(array(step.kl_after).reshape(rows, size)[projected[:, 0], 0], kl, rtol=1e-3)


def test_two_outcomes_have_no_gradient_through_q():
    """The surface of the ball is a single point. A third outcome that is absent makes no difference."""
    old = torch.tensor([[0.0, 0.0], [0.0, -20.0], [-9.0, 0.0], [0.0, -30.0]]).repeat_interleave(2, 0)
    new = torch.tensor([[3.0, 0.0], [-20.0, 0.0], [0.0, 0.0], [-30.0, 0.0]]).repeat_interleave(2, 0)
    absent = torch.full((8, 1), -math.inf)
    outcomes = Outcomes(
        torch.cat([new.log_softmax(-1), absent], -1),
        torch.cat([old.log_softmax(-1), absent], -1),
        torch.tensor([True, True, False]).expand(8, 3),
        torch.tensor([0, 1]).repeat(4),
        torch.tensor(1e-3).expand(8),
    )
    without = Outcomes._make([x[:, :2] if x.dim() == 2 else x for x in outcomes])
    for case in (on_device(outcomes), on_device(without)):
        step, through_q = by_triton(case, {"log_probs": torch.ones(8)})
        assert step.projected.all()
        assert through_q.abs().max() <= 1e-6
        _, through_regression = by_triton(case, {"regression": torch.ones(8)})
        assert through_regression[:2, :2].abs().min() > 0.1
        # The last new policy is floored where p has its mass, and a floored entry has no gradient.
        assert not through_regression[6:, 0].any()


@pytest.mark.filterwarnings("ignore:overflow")  # of a step that is not taken
@pytest.mark.parametrize("family", ["flat", "near_deterministic"])
def test_bounds_below_what_float32_can_meet(family):
    """No promise is made below 1e-3, but the search ends, and every value and gradient is finite."""
    outcomes = outcomes_of(family, 12, 5, absent=False, seed=4)
    kl_bound = tensor(bounds(12, low=1e-14, high=1e-6), torch.float32).to(DEVICE)
    step, gradient = by_triton(outcomes._replace(kl_bound=kl_bound))
    assert step.projected.sum() > 3
    assert all(value.isfinite().all() for value in (*values_of(step), gradient))
    assert (step.kl_after <= kl_bound * (1 + 1e-3))[step.projected].all()


def test_one_outcome():
    certain = torch.zeros(1, 1, device=DEVICE)
    step, gradient = by_triton(
        Outcomes(certain, certain, certain == 0, certain[0].long(), torch.full((1,), 1e-3, device=DEVICE))
    )
    assert not step.projected.any() and step.kl_before.item() == 0 and step.log_probs.item() == 0
    assert gradient.item() == 2  # of log_probs and new_log_probs: both are the raw log-probability


@pytest.mark.parametrize("where", ["new", "old", "both"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_that_are_no_distribution(where, everywhere):
    outcomes = outcomes_of("peaked", 6, 5, absent=False)
    for name in ("new", "old"):
        if where in (name, "both"):
            getattr(outcomes, name)[:2, slice(None) if everywhere else 3] = math.nan
    # As much arrives at the tokens as it does from a loss that is NaN.
    weights = {name: torch.tensor([math.nan, 1, 1, 1, 1, 1]) for name in ("log_probs", "regression")}
    ours, gradient = by_triton(outcomes, weights)
    theirs, expected = by_torch(in_double(outcomes), weights)
    assert_agree(ours, theirs)
    assert ours.kl_before[:2].isnan().all() and not ours.projected[:2].any()
    # The torch code leaves NaN beside a single one, but policies that are read from logits are NaN everywhere.
    assert not gradient[:2].any() and (not expected[:2].any() or not everywhere)
    assert_close(gradient[2:], expected[2:])


def test_nothing_that_arrives_where_nothing_depends_on_it_matters():
    """A masked token may bring NaN to the regression of a token that is not projected."""
    outcomes = outcomes_of("nearly_equal", 4, 5)._replace(kl_bound=torch.full((4,), math.inf, device=DEVICE))
    step, gradient = by_triton(outcomes, {"regression": torch.full((4,), math.nan)})
    assert not step.projected.any() and not gradient.any()


def test_shapes_strides_and_bounds_that_broadcast():
    outcomes = outcomes_of("peaked", 6, 5, absent=False)
    expected, _ = by_torch(outcomes._replace(kl_bound=torch.tensor([0.01, 0.1, 1.0], device=DEVICE).repeat(2)))
    new, old, present, slot, _ = (x.view(2, 3, *x.shape[1:]) for x in outcomes)
    strided = new.movedim(-1, 0).contiguous().movedim(0, -1)
    with torch.no_grad():
        step = token_triton.trust_region_step(
            strided, old, present, slot.T.contiguous().T, torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
        )
    assert_agree(step, token.TrustRegionStep(*(x.view(2, 3) for x in values_of(expected))))
    assert not step.log_probs.requires_grad
    one_bound = token_triton.trust_region_step(new, old, present, slot, 0.1)
    assert torch.equal(one_bound.log_probs[:, 1], step.log_probs[:, 1])
    nothing = token_triton.trust_region_step(new[:0], old[:0], present[:0], slot[:0], 0.1)
    assert all(x.shape == (0, 3) for x in values_of(nothing))


@triton.jit
def _divergence_kernel(p_ptr, q_ptr, x_ptr, terms_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    p, q, x = tl.load(p_ptr + at), tl.load(q_ptr + at), tl.load(x_ptr + at)
    tl.store(terms_ptr + at, token_triton.divergence_terms(p, q, x))


def test_divergence_terms():
    """Against the series in float64 near 0, and against expm1 in float64 elsewhere."""
    size = 4096
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-8, math.log10(40), size) * rng.choice([-1, 1], size)).astype(np.float32)
    x[:8] = 0, 1, -1, np.nextafter(np.float32(-1), np.float32(0)), 0.5, -0.5, 40, -40
    p = (10.0 ** rng.uniform(-12, 0, size)).astype(np.float32)
    exact = p.astype(np.float64)
    wide = x.astype(np.float64)
    near = wide**2 * (1 / 2 + wide / 3 + wide**2 / 8 + wide**3 / 30)
    exact = exact * np.where(np.abs(wide) < 1e-3, near, wide * np.exp(wide) - np.expm1(wide))
    q = p.astype(np.float64) * np.exp(wide)
    arguments = [tensor(value, torch.float32).to(DEVICE) for value in (p, q, x)]
    terms = torch.empty_like(arguments[0])
    _divergence_kernel[(1,)](*arguments, terms, SIZE=size)
    assert terms.min() >= 0
    np.testing.assert_allclose(array(terms), exact, rtol=1e-6, atol=1e-45)


# ---------------------------------------------------------------------------------------------------------------------
# From the logits on


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize(("family", "top_k", "threshold"), [("peaked", 6, 1e-2), ("masked", 4, 0.0), ("flat", 20, 0.0)])
def test_from_logits(family, top_k, threshold, tail, monkeypatch):
    old_logits, new_logits = (tensor(x, torch.float32).to(DEVICE).view(2, 6, 20) for x in pairs(family, 12, 20))
    token_ids = torch.tensor(np.random.default_rng(0).integers(20, size=(2, 6)), device=DEVICE)
    token_ids[0] = old_logits[0].argmax(-1)
    old = troll.SparsePolicy.from_logits(old_logits, token_ids, top_k=top_k, mass_threshold=threshold, tail=tail)
    results = []
    for kernels in ("triton", "torch"):
        monkeypatch.setenv(VARIABLE, kernels)
        logits = new_logits.clone().requires_grad_()
        step = troll.trust_region_log_probs(logits, token_ids, old, kl_bound=0.02)
        loss, _ = troll.troll_loss(step, old.log_prob(token_ids), torch.tensor([1.0, -0.5]).to(DEVICE), step.projected)
        loss = loss + step.new_log_probs.exp().sum()
        loss.backward()
        results.append((step, logits.grad))
    (ours, gradient), (theirs, expected) = results
    assert theirs.projected.any()
    for name in FIELDS:
        actual, wanted = getattr(ours, name), getattr(theirs, name)
        assert_close(actual, wanted, name)
        assert actual.requires_grad == wanted.requires_grad == (name in DIFFERENTIABLE), name
    assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("dtype", "solver", "taken"),
    [(torch.float32, "newton", True), (torch.float64, "newton", False), (torch.float32, "bracket", False)],
)
def test_what_the_kernel_computes(dtype, solver, taken, monkeypatch):
    """Float64 and the other solver are left to torch."""
    calls = []

    def spy(new: Tensor, old: Tensor, present: Tensor, slot: Tensor, kl_bound: float) -> token.TrustRegionStep:
        calls.append(new)
        return token.trust_region_step(new, old, present, slot, kl_bound, "newton")

    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(token_triton, "trust_region_step", spy)
    logits, token_ids = torch.randn(3, 8, dtype=dtype, device=DEVICE), torch.arange(3, device=DEVICE)
    old = troll.SparsePolicy.from_logits(logits, token_ids, top_k=4)
    objective.trust_region_log_probs(logits, token_ids, old, solver=solver)
    assert bool(calls) == taken


@pytest.mark.parametrize("kl_bound", [0.0, math.nan, torch.zeros(3), torch.ones(2)])
def test_bad_bounds(kl_bound):
    outcomes = outcomes_of("flat", 3, 4)
    with pytest.raises(ValueError, match="kl_bound"):
        token_triton.trust_region_step(*outcomes[:4], kl_bound)


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_the_kernels_compile(target, tmp_path: Path):
    lines = run_without_interpreter("tests.trust_region.kernels.compile_token", target, cache=tmp_path)
    names = [line.split()[0] for line in lines if int(line.split()[1]) > 1000]
    assert names == 2 * ["_step_kernel", "_step_kernel", "_gradient_kernel"]
