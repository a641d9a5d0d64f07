"""The two root finders: evaluation counts, the reach of the paper's bracket, registration."""

import numpy as np
import pytest
import torch

from tests.trust_region import reference
from tests.trust_region.cases import FAMILIES, array, bounds, pairs, tensor, true_kl
from troll import project
from troll.trust_region.dual import SOLVERS, TokenCurve, newton


def test_a_registered_solver_is_found_by_name(monkeypatch):
    monkeypatch.setitem(SOLVERS, "mine", SOLVERS["newton"])
    old, new = (tensor(x) for x in pairs("flat", 10, 5))
    mine = project(new, old, kl_bound=0.05, solver="mine")
    assert torch.equal(mine.log_probs, project(new, old, kl_bound=0.05, solver="newton").log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_needs_few_evaluations(dtype):
    """Median at most 5 and worst at most 20 evaluations of KL(τ), over 40,000 pairs."""
    counts = []
    for family in FAMILIES:
        for size in (2, 3, 8, 65):
            old, new = (tensor(x, dtype) for x in pairs(family, 1700, size, seed=11))
            projection = project(new, old, kl_bound=tensor(bounds(1700, seed=11), dtype))
            used = projection.iterations[projection.projected]
            assert not projection.iterations[~projection.projected].any()
            assert (used >= 1).all()
            if used.numel():
                assert used.max() <= 20, (family, size)
                counts.append(used)
    everything = torch.cat(counts)
    assert everything.numel() >= 20_000
    assert everything.double().median() <= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_counts_its_bisections(dtype):
    """None where log KL is as smooth as a parabola; some where KL(τ) is a step; never one more than evaluations."""
    for family, some in (("nearly_equal", False), ("nearly_disjoint", True)):
        old, new = (torch.log_softmax(tensor(x, dtype), -1) for x in pairs(family, 400, 6, seed=15))
        s = new - old
        kl = (new.exp() * s).sum(-1)
        rows = kl > 1e-3
        root = newton(TokenCurve(old[rows], s[rows]), (0.3 * kl[rows]).clamp(max=0.05))
        assert root.bisections.dtype == torch.int64
        assert (root.bisections < root.evaluations).all()
        assert bool(root.bisections.any()) == some, family


@pytest.mark.parametrize("kl_bound", [1e-6, 1e-4, 1e-3, 10.0])
def test_newton_far_from_the_usual_bound(kl_bound):
    for family in FAMILIES:
        old, new = pairs(family, 60, 6, seed=12)
        projection = project(tensor(new), tensor(old), kl_bound=kl_bound)
        chosen = array(projection.projected)
        after = true_kl(array(projection.log_probs), old)[chosen]
        assert (np.abs(after - kl_bound) <= 1e-9).all(), family
        assert projection.iterations.max() <= 20, family


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 5, 40])
def test_bracket_reaches_the_bound(family, size):
    """Held to the numbers of DESIGN.md for ε ≥ 0.01 where η ≤ 1e2 is enough; feasible below, too."""
    old, new = pairs(family, 60, size, seed=13)
    for low, accurate in ((1e-2, True), (1e-4, False)):
        kl_bound = bounds(60, low=low, seed=13)
        rows = [reference.project(n, o, e) for n, o, e in zip(new, old, kl_bound, strict=True)]
        reachable = np.array([row.solution.projected and row.solution.multiplier <= 99 for row in rows])
        for dtype, relative in ((torch.float64, 0.0), (torch.float32, 1e-3)):
            old_t, new_t = tensor(old, dtype), tensor(new, dtype)
            projection = project(new_t, old_t, kl_bound=tensor(kl_bound, dtype), solver="bracket")
            chosen = reachable & array(projection.projected)
            after = true_kl(array(projection.log_probs), array(old_t))[chosen]
            wanted = kl_bound[chosen]
            assert (after <= wanted * (1 + relative) + 1e-9).all()
            if accurate:
                assert (np.abs(after - wanted) <= relative * wanted + 1e-9).all()
            assert (projection.multiplier <= 100.0 * (1 + 1e-6)).all()
            assert projection.iterations.max() <= 8 * 20


def test_bracket_stops_at_its_largest_multiplier():
    old = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)
    new = torch.tensor([[27.0, 0.0, -27.0]], dtype=torch.float64)
    projection = project(new, old, kl_bound=1e-4, solver="bracket")
    assert projection.multiplier.item() == pytest.approx(100.0)
    assert projection.kl_after.item() > 1e-4
    exact = project(new, old, kl_bound=1e-4, solver="newton")
    assert exact.multiplier.item() > 100.0
    assert exact.kl_after.item() == pytest.approx(1e-4, abs=1e-9)
