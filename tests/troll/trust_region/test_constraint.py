"""One multiplier for several tokens: against scipy, finite differences, the token constraint; what must not matter."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

import troll
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import (
    FAMILIES,
    Array,
    array,
    bounds,
    kl_of_logits,
    pairs,
    random_logits,
    tensor,
    true_kl,
)
from troll import Constraint, Projection, project
from troll.trust_region import step as step_file
from troll.trust_region.constraint import REDUCTIONS

PER_TOKEN = ("multiplier", "kl_before", "kl_after", "projected", "iterations")


def ragged_mask(sequences: int, length: int, seed: int = 0) -> Tensor:
    """(B, T) true on a first part of every row, of at least one token."""
    lengths = torch.randint(1, length + 1, (sequences, 1), generator=torch.Generator().manual_seed(seed))
    return torch.arange(length) < lengths


def make(scope: str, mask: Tensor, reduction: Any = "mean") -> Constraint:
    """A multiplier for each row of a (B, T) mask, or one for all its tokens."""
    if scope == "sequence":
        return Constraint.sequence(mask, reduction)
    whole = Constraint.sequence(mask.reshape(1, -1), reduction)
    return dataclasses.replace(whole, group=whole.group.view(mask.shape), weight=whole.weight.view(mask.shape))


def reference_groups(
    new: Array, old: Array, kl_bound: Array, constraint: Constraint
) -> list[tuple[list[int], reference.SharedSolution]]:
    """Indices of each group's tokens with a weight, and scipy's solution for them; (N, V) logits."""
    group, weight = array(constraint.group).ravel(), array(constraint.weight).ravel()
    result = []
    for g in range(constraint.groups):
        tokens = [t for t in range(len(group)) if group[t] == g and weight[t] > 0]
        outcomes = [reference.dense_outcomes(new[t], old[t]) for t in tokens]
        w = weight[tokens]
        bound = float(np.sum(w * kl_bound[tokens]) / np.sum(w))
        result.append((tokens, reference.solve_shared([(o.log_old, o.log_new) for o in outcomes], w, bound)))
    return result


# Values against scipy


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_projection_agrees_with_scipy(family, scope, reduction):
    old, new = pairs(family, 20, 7, seed=1)
    mask, kl_bound = ragged_mask(4, 5), bounds(20, seed=1)
    if reduction == "sum":
        kl_bound = 3 * kl_bound
    constraint = make(scope, mask, reduction)
    projection = project(
        tensor(new).view(4, 5, 7), tensor(old).view(4, 5, 7), tensor(kl_bound).view(4, 5), constraint=constraint
    )
    log_probs, tau = array(projection.log_probs).reshape(20, 7), 1 / (1 + array(projection.multiplier).ravel())
    weight = array(constraint.weight).ravel()
    for tokens, expected in reference_groups(new, old, kl_bound, constraint):
        assert (array(projection.projected).ravel()[tokens] == expected.projected).all()
        assert (tau[tokens] == tau[tokens[0]]).all()
        if not expected.projected:
            assert tau[tokens[0]] == 1
            continue
        w, bound = weight[tokens], np.sum((weight * kl_bound)[tokens]) / np.sum(weight[tokens])
        assert abs(np.sum(w * true_kl(log_probs[tokens], old[tokens])) - bound) <= 1e-9
        assert np.sum(w * array(projection.kl_after).ravel()[tokens]) == pytest.approx(bound, rel=1e-9)
        # τ, and with it q, is known as well as the bound is met: to kl_error / (τ Σ w σ²).
        outcomes = [reference.dense_outcomes(new[t], old[t]) for t in tokens]
        variance = [
            reference.moments(log_q, o.log_new - o.log_old)[1]
            for log_q, o in zip(expected.log_q, outcomes, strict=True)
        ]
        tolerance = 1e-9 + 1e-10 / (expected.tau * np.sum(w * variance))
        assert abs(tau[tokens[0]] - expected.tau) <= tolerance
        np.testing.assert_allclose(np.exp(log_probs[tokens]), np.exp(expected.log_q), rtol=0, atol=30 * tolerance)


def test_shared_projection_solves_the_primal_problem():
    """Against a constrained optimiser that knows nothing of τ: min Σ w KL(q ‖ p̃) s.t. Σ w KL(q ‖ p) ≤ ε."""
    old, new = random_logits(3, 4), random_logits(3, 4, seed=1, scale=2.0)
    weight, kl_bound = np.array([0.5, 1.5, 0.7]), 0.1
    constraint = Constraint(torch.zeros(3, dtype=torch.int64), tensor(weight), 1)
    projection = project(new, old, kl_bound, constraint=constraint)
    log_old, log_new = (array(torch.log_softmax(x, -1)) for x in (old, new))

    def divergence(logits: Array, log_other: Array) -> float:
        log_q = [reference.log_softmax(row) for row in logits.reshape(3, 4)]
        terms = [w * reference.kl_divergence(q, p) for w, q, p in zip(weight, log_q, log_other, strict=True)]
        return math.fsum(terms)

    solved = minimize(
        lambda x: divergence(x, log_new),
        log_old.ravel(),
        constraints={"type": "ineq", "fun": lambda x: kl_bound - divergence(x, log_old)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    expected = np.exp([reference.log_softmax(row) for row in solved.x.reshape(3, 4)])
    np.testing.assert_allclose(np.exp(array(projection.log_probs)), expected, atol=1e-5)
    assert divergence(array(projection.log_probs), log_new) <= solved.fun + 1e-9


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("family", [*FAMILIES, "all"])
def test_shared_projection_in_float32_meets_bound(family, scope):
    """Judged in float64 from the very logits that went in; "all" mixes tokens whose divergences differ by orders."""
    families = FAMILIES if family == "all" else [family]
    for size in (2, 65):
        rows = [pairs(name, 96 // len(families), size, seed=2) for name in families]
        old, new = (tensor(np.concatenate(x), torch.float32) for x in zip(*rows, strict=True))
        shuffled = torch.randperm(96, generator=torch.Generator().manual_seed(0))
        old, new = old[shuffled].view(12, 8, size), new[shuffled].view(12, 8, size)
        mask = ragged_mask(12, 8, seed=size)
        constraint = make(scope, mask)
        before = kl_of_logits(*(array(x).reshape(96, size) for x in (new, old)))
        for kl_bound in (1e-3, 0.03, 1.0):
            projection = project(new, old, kl_bound, constraint=constraint)
            assert projection.iterations.max() <= 30
            chosen = array(projection.projected).ravel()
            after = before.copy()
            after[chosen] = true_kl(array(projection.log_probs[projection.projected]), array(old[projection.projected]))
            group, weight = array(constraint.group).ravel(), array(constraint.weight).ravel()
            total = np.bincount(group, weight * after, constraint.groups)
            was_projected = np.bincount(group, chosen, constraint.groups) > 0
            assert (total <= kl_bound * (1 + 1e-3)).all()
            assert (np.abs(total / kl_bound - 1) <= 1e-3)[was_projected].all()
            unbounded = np.bincount(group, weight * before, constraint.groups)
            assert was_projected[unbounded > kl_bound * (1 + 1e-3)].all()


# The gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_shared_gradients_of_degenerate_policies_are_finite(scope, dtype):
    for family in ("near_deterministic", "nearly_disjoint", "masked"):
        for size in (1, 2, 20):
            old, new = (tensor(x, dtype).view(10, 6, size) for x in pairs(family, 60, size, seed=4))
            logits = new.requires_grad_()
            log_probs = project(logits, old, 0.01, constraint=make(scope, ragged_mask(10, 6))).log_probs
            (gradient,) = torch.autograd.grad(log_probs[log_probs > -math.inf].sum(), logits)
            assert gradient.isfinite().all()


# What must not matter, and what must


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_one_token_are_the_token_constraint(family):
    old, new = (tensor(x) for x in pairs(family, 30, 6, seed=5))
    kl_bound, ones = tensor(bounds(30, low=1e-2, seed=5)), torch.ones(30)
    results = []
    for constraint in (None, Constraint(torch.arange(30).flip(0), ones, 30), Constraint.sequence(ones[:, None])[:, 0]):
        logits = new.clone().requires_grad_()
        projection = project(logits, old, kl_bound, constraint)
        finite = projection.log_probs > -math.inf
        loss = (random_logits(30, 6, seed=6) * torch.where(finite, projection.log_probs, 0.0)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        results.append((projection, gradient))
    (token, token_gradient), *shared = results
    for projection, gradient in shared:
        assert_same(projection, token)
        torch.testing.assert_close(gradient, token_gradient, rtol=1e-9, atol=1e-12)


def assert_same(ours: Projection, expected: Projection, index: Any = ...) -> None:
    """Equal where the second is indexed, up to the order in which sums were taken."""
    for name in ("log_probs", *PER_TOKEN):
        torch.testing.assert_close(
            getattr(ours, name), getattr(expected, name)[index], rtol=1e-9, atol=1e-10, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_tokens_without_weight_do_not_matter(scope):
    old, new = random_logits(3, 5, 6), random_logits(3, 5, 6, seed=1)
    mask = ragged_mask(3, 5)
    constraint = make(scope, mask)
    results = []
    for fill in (0.0, 30.0, math.nan, -math.inf):
        for bound in (0.05, math.inf):
            logits = torch.where(mask.unsqueeze(-1), new, fill).requires_grad_()
            kl_bound = torch.full(mask.shape, 0.05, dtype=torch.float64).masked_fill(~mask, bound)
            projection = project(logits, old, kl_bound, constraint=constraint)
            assert projection.projected[mask].all()
            (gradient,) = torch.autograd.grad((projection.log_probs[mask] * new[mask]).sum(), logits)
            assert gradient[mask].isfinite().all()
            results.append((projection, gradient[mask]))
    compact = project(new[mask], old[mask], 0.05, constraint=constraint[mask])
    for projection, gradient in results:
        assert_same(compact, projection, mask)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-12, atol=1e-14)


LOGITS = st.lists(
    st.tuples(*[st.one_of(st.floats(-40, 40), st.sampled_from([0.0, -math.inf]))] * 2), min_size=3, max_size=3
)
TOKENS = st.lists(
    st.tuples(LOGITS, st.integers(0, 2), st.one_of(st.just(0.0), st.floats(1e-3, 10))), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tokens=TOKENS, exponent=st.floats(-3, 0))
def test_shared_projection_of_any_group_meets_bound(tokens, exponent):
    old, new = np.array([logits for logits, _, _ in tokens]).transpose(2, 0, 1)
    assume(all(reference.is_finite_row(row) for row in (*old, *new)))
    constraint = Constraint(
        torch.tensor([group for _, group, _ in tokens]), tensor(np.array([weight for *_, weight in tokens])), 3
    )
    kl_bound = 10.0**exponent
    projection = project(tensor(new), tensor(old), kl_bound, constraint)
    assert not projection.log_probs.isnan().any()
    group, weight = array(constraint.group), array(constraint.weight)
    for g in set(group.tolist()):
        members = group == g
        before, after = ((weight * array(x))[members].sum() for x in (projection.kl_before, projection.kl_after))
        projected = array(projection.projected)[members]
        assert (projected == projected[0]).all()
        if not projected[0]:
            assert before <= kl_bound * (1 + 1e-12)
            continue
        assert before > kl_bound * (1 - 1e-12)
        judged = np.sum(weight[members] * true_kl(array(projection.log_probs)[members], old[members]))
        assert judged == pytest.approx(after, rel=1e-9, abs=1e-12)
        assert kl_bound * (1 - 1e-9) <= judged <= kl_bound * (1 + 1e-9)


# Nothing to project, and broken rows


def test_shared_projection_without_tokens_or_weight():
    for shape in ((0, 4), (3, 0)):
        new = torch.zeros(*shape, 5, requires_grad=True)
        for scope in ("sequence", "batch"):
            constraint = make(scope, torch.zeros(shape, dtype=torch.bool))
            projection = project(new, torch.zeros(*shape, 5), 0.05, constraint)
            assert projection.log_probs.shape == (*shape, 5)
            projection.log_probs.sum().backward()
    new, old = random_logits(2, 3, 5), random_logits(2, 3, 5, seed=1)
    masked = Constraint.sequence(torch.tensor([[0, 0, 0], [1, 1, 1]]))
    projection = project(new, old, 0.05, masked)
    assert projection.projected.tolist() == [[False] * 3, [True] * 3]
    torch.testing.assert_close(projection.log_probs[0], torch.log_softmax(new[0], -1))


@pytest.mark.parametrize("side", ["new", "old"])
def test_broken_row_breaks_only_its_group(side):
    old, new = random_logits(4, 3, 5), random_logits(4, 3, 5, seed=1)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
    constraint = Constraint.sequence(mask)
    clean = project(new, old, 0.05, constraint)
    target = new if side == "new" else old
    target[0, 1], target[2, 2], target[3, 0] = math.nan, math.inf, -math.inf  # the last two have no weight
    logits = new.requires_grad_()
    projection = project(logits, old, 0.05, constraint)

    assert projection.kl_before.isnan().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert projection.log_probs[0].isnan().all() and projection.kl_after[0].isnan().all()
    assert not projection.projected[0].any()
    assert projection.log_probs[2, 2].isnan().all() and projection.log_probs[3, 0].isnan().all()
    fine = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    assert torch.equal(projection.log_probs[fine], clean.log_probs[fine])
    (gradient,) = torch.autograd.grad(projection.log_probs[fine].square().sum(), logits)
    assert gradient[fine].isfinite().all()


# The objective


def test_step_with_constraint_does_not_take_the_kernel(monkeypatch):
    logits, token_ids = random_logits(2, 3, 6, scale=3.0), torch.zeros(2, 3, dtype=torch.int64)
    old = troll.capture(random_logits(2, 3, 6, seed=1), token_ids)
    constraint = Constraint.sequence(torch.ones(2, 3))
    expected = troll.trust_region_step(logits, old, constraint=constraint)
    monkeypatch.setattr(step_file, "use_triton", lambda *_: True)
    step = troll.trust_region_step(logits, old, constraint=constraint)
    assert torch.equal(step.log_ratio, expected.log_ratio)
    assert (step.multiplier[:, 0] == step.multiplier[:, 1]).all()


# Construction and bad input


def test_sequence_weights_are_means_or_sums():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert Constraint.sequence(mask).weight.tolist() == [[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert Constraint.sequence(mask).group.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert torch.equal(Constraint.sequence(mask.bool(), "sum").weight, mask.double())
    assert Constraint.sequence(mask).groups == 3


def test_constraint_index_keeps_groups():
    constraint = Constraint.sequence(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    for index in (
        torch.tensor([[1, 0, 1], [0, 0, 1]]).bool(),
        (torch.tensor([0, 0, 1]), torch.tensor([0, 2, 2])),
        1,
        (slice(None), slice(1, None)),
    ):
        part = constraint[index]
        assert torch.equal(part.group, constraint.group[index])
        assert torch.equal(part.weight, constraint.weight[index])
        assert part.groups == 2


def project_with(group: list[int], weight: list[float]) -> Projection:
    constraint = Constraint(torch.tensor(group), torch.tensor(weight), 1)
    return project(torch.zeros(3, 4), torch.zeros(3, 4), constraint=constraint)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("mask", lambda: Constraint.sequence(torch.ones(3))),
        ("reduction.*mean, sum.*median", lambda: Constraint.sequence(torch.ones(1, 3), "median")),  # type: ignore[arg-type]
        ("group", lambda: Constraint(torch.zeros(3), torch.ones(3), 1)),
        ("weight", lambda: Constraint(torch.zeros(3, dtype=torch.int64), torch.ones(2), 1)),
        ("weight", lambda: Constraint(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), 1)),
        ("constraint.*positions", lambda: project_with([0, 0], [1.0, 1.0])),
        (r"group.*\[0, 1\)", lambda: project_with([0, 1, 0], [1.0, 1.0, 1.0])),
        (r"group.*\[0, 1\)", lambda: project_with([0, -1, 0], [1.0, 1.0, 1.0])),
        ("weight", lambda: project_with([0, 0, 0], [1.0, -1.0, 1.0])),
        ("weight", lambda: project_with([0, 0, 0], [1.0, math.nan, 1.0])),
    ],
)
def test_constraint_refuses_bad_arguments(message, call):
    with pytest.raises(ValueError, match=message):
        call()
