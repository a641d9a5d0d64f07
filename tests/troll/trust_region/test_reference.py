"""The reference against itself: finite differences, a general-purpose optimiser, and identities."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import pairs

Array = np.ndarray
OUTCOMES = (reference.bucket_outcomes, reference.floor_outcomes)


def central_differences(function, point: Array, spacing: float = 1e-5) -> Array:
    gradient = np.zeros_like(point)
    for v in range(len(point)):
        if point[v] == -np.inf:
            continue
        up, down = point.copy(), point.copy()
        up[v] += spacing
        down[v] -= spacing
        gradient[v] = (function(up) - function(down)) / (2 * spacing)
    return gradient


@pytest.mark.parametrize(
    ("probs", "token", "top_k", "threshold", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], 3, 2, 0.0, [3, 2]),
        ([0.25, 0.25, 0.25, 0.25], 0, 3, 0.0, [0, 1, 2]),  # ties: smaller id first
        ([0.2, 0.4, 0.4, 0.0], 1, 4, 0.0, [1, 2, 0, 3]),  # threshold 0 keeps even a token without mass
        ([0.1, 0.2, 0.3, 0.4], 0, 2, 0.0, [3, 0]),  # the sampled token replaces the last slot
        ([0.9, 0.05, 0.03, 0.02], 0, 4, 0.2, [0]),  # 0.1 left after the first slot
        ([0.9, 0.05, 0.03, 0.02], 0, 4, 0.06, [0, 1]),
        ([0.9, 0.05, 0.03, 0.02], 3, 4, 0.2, [0, 3]),  # appended: there is room
        ([0.9, 0.05, 0.03, 0.02], 3, 1, 0.2, [3]),  # replaces: there is none
        ([0.6, 0.4], 1, 64, 0.0, [0, 1]),  # K = min(top_k, V)
        ([1.0], 0, 1, 0.5, [0]),
    ],
)
def test_slots(probs, token, top_k, threshold, expected):
    with np.errstate(divide="ignore"):
        assert reference.slots(np.log(probs), token, top_k, threshold) == expected


def test_capture_by_hand():
    """Raw numbers, and the exact tail."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    old = reference.capture(logits, 2, 2, 0.0)
    assert (old.ids, old.slot, old.token, old.vocabulary) == ([0, 2], 1, 2, 4)
    assert np.exp(old.log_probs) == pytest.approx([0.5, 0.15])
    assert math.exp(old.tail_log_prob) == pytest.approx(0.35)
    assert math.exp(old.log_prob) == pytest.approx(0.15)
    assert reference.capture(logits, 0, 4, 0.0).tail_log_prob == -math.inf
    # Nothing is floored.
    assert reference.capture(np.array([0.0, -80.0]), 1, 2, 0.0).log_prob == pytest.approx(-80.0)


def test_absent_tail_is_not_an_outcome():
    logits = np.array([0.0, 1.0, -np.inf, -np.inf])
    old = reference.capture(logits, 0, 2, 0.0)
    assert old.tail_log_prob == -math.inf
    assert len(reference.bucket_outcomes(logits, old).tokens) == 2
    # The new policy has mass there: now the tail is an outcome, floored in the old policy.
    outcomes = reference.bucket_outcomes(np.array([0.0, 1.0, 0.0, -np.inf]), old)
    assert len(outcomes.tokens) == 3
    assert math.exp(outcomes.log_old[2]) == pytest.approx(1e-12)


def test_floor_outcomes_by_hand():
    old = reference.capture(np.log([0.6, 0.3, 0.06, 0.04]), 0, 1, 0.0)
    outcomes = reference.floor_outcomes(np.log([0.2, 0.1, 0.6, 0.1]), old)
    # K = 1: the sampled token holds the only slot of either policy, so their union is that token.
    assert outcomes.tokens == [[0], [1, 2, 3]]
    old = reference.capture(np.log([0.6, 0.3, 0.06, 0.04]), 0, 2, 0.0)
    outcomes = reference.floor_outcomes(np.log([0.2, 0.1, 0.6, 0.1]), old)
    assert outcomes.tokens == [[0], [1], [2], [3]]
    assert np.exp(outcomes.log_old) == pytest.approx([2 / 3, 1 / 3, 1e-12 / 0.9, 1e-12 / 0.9])
    assert np.exp(outcomes.log_new) == pytest.approx([2 / 9, 1 / 9, 6 / 9, 1e-12 / 0.9])
    assert outcomes.blocked.tolist() == [False, False, False, True]


def test_unprojected_ratio_is_of_raw_probabilities():
    """Below the floor too; in the paper's step of what the floor leaves of them, which is nothing here."""
    old = reference.capture(np.array([0.0, 0.3, -60.0, -1.0]), 2, 4, 0.0)
    new_row = np.array([0.0, 0.3, -61.5, -1.0])
    assert reference.step(new_row, old, 0.05).log_ratio == pytest.approx(-1.5, abs=1e-12)
    assert reference.step(new_row, old, 0.05, paper=True).log_ratio == pytest.approx(0.0, abs=1e-12)


def test_projected_ratio_above_floor_is_the_papers():
    """log q(o) − log p(o) of the normalised (η log p + log p̃)/(η + 1), with three outcomes."""
    old_row, new_row = np.log([0.7, 0.2, 0.1]), np.log([0.2, 0.3, 0.5])
    for paper in (False, True):
        step = reference.step(new_row, reference.capture(old_row, 1, 3, 0.0), 0.05, paper=paper)
        assert step.projected
        log_q = reference.log_softmax((step.multiplier * old_row + new_row) / (step.multiplier + 1))
        assert step.log_ratio == pytest.approx(log_q[1] - old_row[1], abs=1e-10)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("log_p", [-5.0, -30.0, -60.0])
def test_ratio_is_continuous_at_bound(log_p, paper):
    """The sampled token moves by 0.7, which hardly counts in the divergence; the others make it cross the bound."""
    old_row = np.array([0.0, -1.0, log_p])
    new_row = np.array([0.0, -0.5, log_p - 0.7])
    old = reference.capture(old_row, 2, 3, 0.0)
    kl = reference.step(new_row, old, 1.0, paper=paper).kl_before
    inside, outside = (reference.step(new_row, old, kl * factor, paper=paper) for factor in (1 + 1e-9, 1 - 1e-9))
    assert (inside.projected, outside.projected) == (False, True)
    assert outside.log_ratio == pytest.approx(inside.log_ratio, abs=1e-7)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kl_bound", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("family", ["flat", "peaked"])
def test_projection_is_the_constrained_minimum(family, kl_bound, size):
    old_logits, new_logits = pairs(family, 5, size)
    for old_row, new_row in zip(0.5 * old_logits, 0.5 * new_logits, strict=True):
        log_old, log_new = reference.log_softmax(old_row), reference.log_softmax(new_row)
        solution = reference.solve(log_old, log_new, kl_bound)

        found = minimize(
            lambda z, target=log_new: reference.kl_divergence(reference.log_softmax(z), target),
            x0=log_old,
            constraints={
                "type": "ineq",
                "fun": lambda z, centre=log_old: kl_bound - reference.kl_divergence(reference.log_softmax(z), centre),
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert np.exp(solution.log_q) == pytest.approx(np.exp(reference.log_softmax(found.x)), abs=2e-5)
        assert reference.kl_divergence(solution.log_q, log_new) <= found.fun + 1e-8
        assert solution.kl_after <= kl_bound + 1e-12


def test_gradient_of_the_dense_projection():
    rng = np.random.default_rng(1)
    projected = 0
    for family, size in (("flat", 7), ("peaked", 7), ("masked", 7), ("flat", 2)):
        old_logits, new_logits = pairs(family, 8, size)
        for old_row, new_row in zip(old_logits, new_logits, strict=True):
            upstream = rng.standard_normal(size)

            def weighted(z, old=old_row, weight=upstream):
                log_probs = reference.project(z, old, 0.05).log_probs
                return float(np.sum(weight * np.where(np.isfinite(log_probs), log_probs, 0.0)))

            row = reference.project(new_row, old_row, 0.05)
            gradient = row.gradient(np.where(np.isfinite(row.log_probs), upstream, 0.0))
            assert gradient == pytest.approx(central_differences(weighted, new_row), abs=1e-6)
            projected += row.solution.projected
    assert projected >= 12


def floored_entries(rng: np.random.Generator, old_row: Array, new_row: Array) -> None:
    """Put −inf and sub-floor logits into both rows."""
    where = rng.permutation(len(new_row))
    new_row[where[0]] = -np.inf
    new_row[where[1]] = new_row.max() - 32.0
    old_row[where[2]] = old_row.max() - 33.0
    old_row[where[0]] = -np.inf


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("with_floor", [False, True])
@pytest.mark.parametrize("kl_bound", [0.05, 20.0])
def test_step_gradients(with_floor, kl_bound, paper):
    outcomes_of = OUTCOMES[paper]
    rng = np.random.default_rng(2)
    size, projected, below = 9, 0, 0
    for trial in range(16):
        old_row = rng.uniform(0.5, 2.0) * rng.standard_normal(size)
        new_row = old_row + rng.standard_normal(size)
        if with_floor:
            floored_entries(rng, old_row, new_row)
        # Below the floor in the new policy or in the old one, in half of the rows that have such tokens.
        token = int(rng.integers(size))
        if with_floor and trial % 4 < 2:
            token = int((np.where(np.isfinite(new_row), new_row, np.inf) if trial % 4 else old_row).argmin())
        old = reference.capture(old_row, token, top_k=2 + trial % 4, mass_threshold=1e-2)
        step = reference.step(new_row, old, kl_bound, paper=paper)
        projected += step.projected
        below += bool(min(step.log_prob, old.log_prob) < math.log(reference.FLOOR))

        for name in ("log_ratio", "log_prob"):
            if getattr(step, name) == -np.inf:
                continue
            differences = central_differences(
                lambda z, name=name, old=old: getattr(reference.step(z, old, kl_bound, paper=paper), name), new_row
            )
            assert getattr(step, f"{name}_gradient") == pytest.approx(differences, abs=1e-6), (name, trial)

        outcomes = outcomes_of(new_row, old)
        frozen = reference.solve(outcomes.log_old, outcomes.log_new, kl_bound)
        if frozen.projected:
            differences = central_differences(
                lambda z, old=old, log_q=frozen.log_q: reference.kl_divergence(outcomes_of(z, old).log_new, log_q),
                new_row,
            )
            assert step.regression_gradient == pytest.approx(differences, abs=1e-6)
        else:
            assert step.regression == 0.0
            assert not step.regression_gradient.any()
    assert projected >= 6 if kl_bound == 0.05 else projected <= 8
    assert below >= 6 if with_floor else below == 0


@pytest.mark.parametrize("with_floor", [False, True])
@pytest.mark.parametrize("kl_bound", [0.05, math.inf])
def test_proximal_gradient_is_the_one_of_differences(with_floor, kl_bound):
    """p̃ − p on raw outcomes, projected or not, and nothing through a floored entry."""
    rng = np.random.default_rng(3)
    for trial in range(12):
        old_row = rng.standard_normal(9)
        new_row = old_row + rng.standard_normal(9)
        if with_floor:
            floored_entries(rng, old_row, new_row)
        old = reference.capture(old_row, int(rng.integers(9)), top_k=2 + trial % 4, mass_threshold=1e-2)
        step = reference.step(new_row, old, kl_bound, "proximal")
        differences = central_differences(
            lambda z, old=old: reference.step(z, old, kl_bound, "proximal").regression, new_row
        )
        assert step.regression > 0
        assert step.regression_gradient == pytest.approx(differences, abs=1e-6)


def test_shared_step_gradients_are_those_of_differences():
    """One group, with a token of weight 0 and one whose sampled token is below the floor; and one inside its bound."""
    rng = np.random.default_rng(5)
    old_rows = rng.standard_normal((3, 7))
    new_rows = old_rows + rng.standard_normal((3, 7))
    old_rows[1, 4], new_rows[1, 4] = -31.0, -32.0
    olds = [reference.capture(row, token, 4, 1e-2) for row, token in zip(old_rows, (2, 4, 0), strict=True)]
    weights, upstream = np.array([0.5, 1.5, 0.0]), np.array([1.0, -0.5, 2.0])

    def steps(z: Array, kl_bound: float) -> list[reference.StepRow]:
        return reference.shared_step(list(zip(z.reshape(3, 7), olds, strict=True)), weights, kl_bound, upstream)

    for kl_bound in (0.05, 50.0):
        found = steps(new_rows, kl_bound)
        assert all(step.projected == (kl_bound == 0.05) for step in found)

        def total(z: Array, kl_bound: float = kl_bound) -> float:
            return float(sum(u * step.log_ratio for u, step in zip(upstream, steps(z, kl_bound), strict=True)))

        differences = central_differences(total, new_rows.ravel()).reshape(3, 7)
        assert np.array([step.log_ratio_gradient for step in found]) == pytest.approx(differences, abs=1e-6)


@pytest.mark.parametrize("pull", ["projection", "proximal"])
def test_shared_step_of_one_token_is_step(pull):
    for old_row, new_row in zip(*pairs("peaked", 8, 9), strict=True):
        old = reference.capture(old_row, 3, 4, 1e-2)
        (shared,) = reference.shared_step([(new_row, old)], [1.0], 0.05, np.ones(1), pull)
        for name, value in vars(reference.step(new_row, old, 0.05, pull)).items():
            assert getattr(shared, name) == pytest.approx(value, rel=1e-9, abs=1e-11), name


def test_truncated_step_gradients_are_those_of_differences():
    rng = np.random.default_rng(6)
    old_row = rng.standard_normal(9)
    new_row = old_row + 0.5 * rng.standard_normal(9)
    ids = reference.kept_set(old_row, top_k=5)
    log_probs, tail = reference.log_softmax(old_row[ids]), reference.on_support(old_row, ids)[1]
    old = reference.OldRow(ids, log_probs, tail, 2, 5, 0.0, 9)
    for kl_bound, pull in ((0.01, "proximal"), (math.inf, "proximal"), (math.inf, "projection")):
        found = reference.truncated_step(new_row, old, kl_bound, pull)
        for name in ("log_ratio", "log_prob", "regression"):

            def value(z: Array, name: str = name, kl_bound: float = kl_bound, pull: str = pull) -> float:
                return getattr(reference.truncated_step(z, old, kl_bound, pull).step, name)

            wanted = central_differences(value, new_row)
            assert getattr(found.step, f"{name}_gradient") == pytest.approx(wanted, abs=1e-6), name
        for name in ("kept_log_mass", "entropy"):

            def extra(z: Array, name: str = name) -> float:
                return getattr(reference.truncated_step(z, old, math.inf), name)

            assert getattr(found, f"{name}_gradient") == pytest.approx(central_differences(extra, new_row), abs=1e-6)
    assert found.step.regression == 0.0
    _, gradient = reference.entropy(new_row)
    assert gradient == pytest.approx(central_differences(lambda z: reference.entropy(z)[0], new_row), abs=1e-6)


def test_chain_rule_between_bucket_and_dense():
    for old_row, new_row in zip(*pairs("flat", 20, 12), strict=True):
        old = reference.capture(old_row, 3, top_k=5, mass_threshold=0.0)
        rest = reference.complement(12, old.ids)
        log_old, log_new = reference.log_softmax(old_row), reference.log_softmax(new_row)
        outcomes = reference.bucket_outcomes(new_row, old)
        bucket = reference.kl_divergence(outcomes.log_new, outcomes.log_old)
        inside_tail = reference.kl_divergence(
            reference.log_softmax(log_new[rest]), reference.log_softmax(log_old[rest])
        )
        tail_mass = math.exp(reference.on_support(new_row, old.ids)[1])
        assert reference.kl_divergence(log_new, log_old) == pytest.approx(bucket + tail_mass * inside_tail, abs=1e-12)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("family", ["flat", "near_deterministic", "masked"])
def test_full_support_equals_dense(family, paper):
    for old_row, new_row in zip(*pairs(family, 20, 8), strict=True):
        token = int(np.argmax(old_row))
        old = reference.capture(old_row, token, top_k=8, mass_threshold=0.0)
        step = reference.step(new_row, old, 0.05, paper=paper)
        dense = reference.project(new_row, old_row, 0.05)
        log_q, one_hot = dense.solution.log_q[token], np.eye(8)[token]
        assert step.kl_before == pytest.approx(dense.solution.kl_before, abs=1e-10)
        if np.exp(dense.outcomes.log_new[token]) < 1.1e-12:
            continue  # a ratio of what is floored is tested above
        assert step.log_ratio == pytest.approx(log_q - dense.outcomes.log_old[token], abs=1e-9)
        assert step.log_ratio_gradient == pytest.approx(dense.gradient(one_hot), abs=1e-7)
