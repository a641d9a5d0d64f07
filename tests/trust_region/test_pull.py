"""The proximal pull, KL(p ‖ p̃), against the reference, finite differences and what it has to equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import troll
from tests.tolerance import within
from tests.trust_region import reference
from tests.trust_region.cases import FAMILIES, LOGIT, TOKEN_FIELDS, array, capture_rows, pairs, random_logits, tensor
from troll import Constraint, troll_loss, trust_region_step

TAILS: tuple[Any, ...] = ("bucket", "floor")
SUPPORTS = [(1, 0.0), (4, 1e-2), (20, 0.0)]

pytestmark = pytest.mark.filterwarnings("ignore:tail='floor' sees divergences:UserWarning")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("top_k", "threshold"), SUPPORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_proximal_pull_agrees_with_the_reference(family, top_k, threshold, tail):
    old_logits, new_logits = pairs(family, 16, 20, seed=1)
    tokens = old_logits.argmax(1)
    old = troll.capture(tensor(old_logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold)
    logits = tensor(new_logits).requires_grad_()
    step = trust_region_step(logits, old, 0.02, tail=tail, pull="proximal")
    (gradient,) = torch.autograd.grad(step.regression.sum(), logits)
    for b, row in enumerate(capture_rows(old_logits, tokens, top_k, threshold)):
        expected = reference.step(new_logits[b], row, 0.02, tail, "proximal")
        assert step.regression[b].item() == pytest.approx(expected.regression, rel=1e-9, abs=1e-11)
        wanted = expected.regression_gradient
        np.testing.assert_allclose(array(gradient[b]), wanted, rtol=within(1e-8), atol=within(1e-9))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=9),
    top_k=st.integers(1, 10),
    threshold=st.sampled_from([0.0, 1e-5, 1e-2, 0.5]),
    tail=st.sampled_from(TAILS),
    kl_bound=st.sampled_from([1e-3, 0.05, math.inf]),
    data=st.data(),
)
def test_any_proximal_pull(rows, top_k, threshold, tail, kl_bound, data):
    """It is what the reference says, never negative, and no gradient is infinite; all else is as with the default."""
    old_logits, new_logits = np.array(rows).T.reshape(2, -1)
    assume(reference.is_finite_row(old_logits) and reference.is_finite_row(new_logits))
    token = data.draw(st.integers(0, len(rows) - 1))
    row = reference.capture(old_logits, token, top_k, threshold)
    expected = reference.step(new_logits, row, kl_bound, tail, "proximal")
    assume(abs(expected.kl_before - kl_bound) > 1e-9)

    old = troll.capture(tensor(old_logits[None]), torch.tensor([token]), top_k=top_k, mass_threshold=threshold)
    logits = tensor(new_logits[None]).requires_grad_()
    step = trust_region_step(logits, old, kl_bound, tail=tail, pull="proximal")
    assert step.regression.item() == pytest.approx(expected.regression, rel=1e-9, abs=1e-10)
    (gradient,) = torch.autograd.grad(step.regression.sum(), logits)
    np.testing.assert_allclose(array(gradient[0]), expected.regression_gradient, rtol=within(1e-7), atol=within(1e-8))
    paper = trust_region_step(logits, old, kl_bound, tail=tail)
    for name in TOKEN_FIELDS:
        assert name == "regression" or torch.equal(getattr(step, name), getattr(paper, name)), name


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kl_bound", [0.05, math.inf])
def test_gradcheck_of_proximal_pull(tail, kl_bound):
    new_logits = random_logits(5, 9, seed=2)
    old = troll.capture(random_logits(5, 9, seed=3), torch.arange(5), top_k=4, mass_threshold=1e-2)

    def pull(logits: torch.Tensor) -> torch.Tensor:
        return trust_region_step(logits, old, kl_bound, tail=tail, pull="proximal").regression

    assert torch.autograd.gradcheck(pull, new_logits.requires_grad_(), eps=1e-6, atol=1e-6, rtol=1e-6)


def test_proximal_pull_acts_inside_the_ball_and_the_papers_does_not():
    old_logits = random_logits(4, 9, seed=4)
    old = troll.capture(old_logits, torch.arange(4), mass_threshold=0.0)
    logits = (old_logits + 0.01 * random_logits(4, 9, seed=5)).requires_grad_()
    paper, ours = (trust_region_step(logits, old, 0.05, pull=pull) for pull in ("projection", "proximal"))
    assert not ours.projected.any() and not paper.regression.any() and (ours.regression > 0).all()
    (gradient,) = torch.autograd.grad(ours.regression.sum(), logits)
    expected = logits.detach().softmax(-1) - old_logits.softmax(-1)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_proximal_pull_of_equal_policies_is_zero():
    logits = random_logits(4, 9, seed=4).requires_grad_()
    old = troll.capture(logits, torch.arange(4), top_k=4)
    step = trust_region_step(logits, old, pull="proximal")
    (gradient,) = torch.autograd.grad(step.regression.sum(), logits)
    assert step.regression.abs().max() <= 1e-14 and gradient.abs().max() <= 1e-14


@pytest.mark.parametrize("kl_bound", [0.05, math.inf])
def test_a_weight_of_zero_leaves_the_projected_ratio_only(kl_bound):
    """Exactly, whichever pull it is; and with an infinite bound, the raw one."""
    old_logits = random_logits(3, 5, 9, seed=6)
    old = troll.capture(old_logits, torch.zeros(3, 5, dtype=torch.int64), top_k=4)
    found = []
    for pull in ("projection", "proximal"):
        logits = (old_logits + random_logits(3, 5, 9, seed=7)).requires_grad_()
        step = trust_region_step(logits, old, kl_bound, pull=pull)
        loss, _ = troll_loss(step, torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, 5), regression_weight=0.0)
        found.append((loss, *torch.autograd.grad(loss, logits)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    if kl_bound == math.inf:
        assert torch.equal(step.log_ratio, step.log_prob - old.log_prob)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_shared_multiplier_does_not_change_the_proximal_pull(scope):
    old_logits = random_logits(2, 4, 9, seed=8)
    old = troll.capture(old_logits, torch.zeros(2, 4, dtype=torch.int64), top_k=4)
    new_logits = old_logits + random_logits(2, 4, 9, seed=9)
    constraint = getattr(Constraint, scope)(torch.ones(2, 4))
    shared = trust_region_step(new_logits, old, constraint=constraint, pull="proximal")
    assert shared.projected.any()
    assert torch.equal(shared.regression, trust_region_step(new_logits, old, pull="proximal").regression)


@pytest.mark.parametrize("tail", TAILS)
def test_proximal_pull_of_rows_that_are_not_finite(tail):
    """NaN, and no gradient from the logits on, as with the paper's pull."""
    old_logits, new_logits = random_logits(3, 9, seed=10), random_logits(3, 9, seed=11)
    old = troll.capture(old_logits, torch.arange(3), top_k=4)
    new_logits[1, 8] = math.nan
    logits = new_logits.requires_grad_()
    step = trust_region_step(logits, old, tail=tail, pull="proximal")
    assert step.regression.isnan().tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(step.regression[[0, 2]].sum(), logits)
    assert gradient.isfinite().all() and not gradient[1].any()
