"""The search for the root: evaluation counts, bisections, and bounds far from the usual one."""

import numpy as np
import pytest
import torch

from tests.troll.trust_region.cases import FAMILIES, array, bounds, pairs, tensor, true_kl
from troll import project
from troll.trust_region.dual import TokenCurve, newton


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
