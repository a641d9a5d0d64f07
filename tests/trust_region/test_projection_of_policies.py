"""project() of two policies on one support, against the reference."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import troll
from tests.trust_region import reference
from tests.trust_region.cases import (
    FAMILIES,
    array,
    assert_log_probs,
    bounds,
    capture_rows,
    pairs,
    random_logits,
    tensor,
)
from troll import SparsePolicy, project


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("top_k", "threshold"), [(1, 0.0), (5, 1e-2), (8, 1e-5), (30, 0.0)])
def test_sparse_agrees_with_the_reference(family, top_k, threshold):
    old_logits, new_logits = pairs(family, 25, 30, seed=6)
    tokens = np.random.default_rng(6).integers(30, size=25)
    kl_bound, width = bounds(25, low=1e-2, seed=6), min(top_k, 30) + 1
    rows = capture_rows(old_logits, tokens, top_k, threshold)
    old = troll.capture(tensor(old_logits), tensor(tokens, torch.int64), top_k=top_k, mass_threshold=threshold)
    logits = tensor(new_logits).requires_grad_()
    projection = project(troll.log_probs_at(logits, old.token_ids), old, kl_bound=tensor(kl_bound))
    assert projection.log_probs.shape == (25, width)

    upstream = array(random_logits(25, width, seed=7))
    finite = projection.log_probs > -math.inf
    torch.where(finite, projection.log_probs, 0.0).backward(gradient=tensor(upstream))
    assert logits.grad is not None
    for b, old_row in enumerate(rows):
        row = reference.project(new_logits[b], old_row, float(kl_bound[b]))
        used, tail_present = len(old_row.ids), len(row.outcomes.tokens) > len(old_row.ids)
        where = [*range(used), *([width - 1] if tail_present else [])]
        assert bool(projection.projected[b]) == row.solution.projected
        assert projection.kl_before[b].item() == pytest.approx(row.solution.kl_before, rel=1e-9, abs=1e-11)
        assert projection.kl_after[b].item() == pytest.approx(row.solution.kl_after, abs=1e-9)
        got = array(projection.log_probs[b])
        assert (got[[i for i in range(width) if i not in where]] == -np.inf).all()
        assert_log_probs(got[where], row)
        if family not in ("near_deterministic", "nearly_disjoint"):  # there σ² is too small for six digits
            expected = row.gradient(np.where(np.isfinite(row.log_probs), upstream[b][where], 0.0))
            np.testing.assert_allclose(array(logits.grad[b]), expected, rtol=1e-6, atol=1e-6)


def test_any_two_policies_on_one_support():
    """As captured, or as read: from equal numbers the same comes out."""
    old_logits, new_logits = (tensor(x) for x in pairs("peaked", 30, 20, seed=9))
    old = troll.capture(old_logits, torch.arange(30) % 20, top_k=6, mass_threshold=1e-2)
    new = troll.log_probs_at(new_logits, old.token_ids)
    read = troll.log_probs_at(old_logits, old.token_ids)
    kept = SparsePolicy(old.token_ids, new.log_probs, new.tail_log_prob, old.slot, 20, 1e-2)
    expected = project(new, old, 0.05)
    assert expected.projected.any()
    for first, second in ((new, read), (kept, old), (kept, read)):
        projection = project(first, second, 0.05)
        assert torch.equal(projection.projected, expected.projected)
        # The two forms differ by rounding, of numbers of about 10, and the root by what it may.
        torch.testing.assert_close(projection.log_probs.exp(), expected.log_probs.exp(), rtol=0, atol=1e-9)
        torch.testing.assert_close(projection.kl_before, expected.kl_before, rtol=1e-12, atol=1e-13)


def test_of_two_policies_that_were_read_only_the_new_one_has_a_gradient():
    logits, old_logits = random_logits(5, 9).requires_grad_(), random_logits(5, 9, seed=1).requires_grad_()
    ids = torch.arange(4).expand(5, 4)
    projection = project(troll.log_probs_at(logits, ids), troll.log_probs_at(old_logits, ids), 0.05)
    assert projection.projected.any()
    (projection.log_probs * random_logits(5, 5, seed=2)).sum().backward()
    assert logits.grad is not None and logits.grad.any()
    assert old_logits.grad is None or not old_logits.grad.any()


def test_policies_in_half_precision_are_projected_in_float32():
    old_logits, new_logits = (tensor(x) for x in pairs("flat", 20, 12, seed=10))
    old = troll.capture(old_logits, torch.zeros(20, dtype=torch.int64), top_k=5).to(torch.bfloat16)
    new = troll.log_probs_at(new_logits, old.token_ids)
    halved = dataclasses.replace(new, logits=new.logits.bfloat16(), tail_logit=new.tail_logit.bfloat16())
    projection = project(halved, old, 0.05)
    assert projection.log_probs.dtype == projection.kl_after.dtype == torch.float32
    assert projection.projected.any()
    after = projection.kl_after[projection.projected]
    torch.testing.assert_close(after, torch.full_like(after, 0.05), rtol=1e-3, atol=0)


def test_policies_of_two_kinds_or_on_two_supports_are_refused():
    dense: Any = torch.zeros(2, 4)
    sparse: Any = troll.capture(dense, torch.zeros(2, dtype=torch.int64))
    read: Any = troll.log_probs_at(dense, sparse.token_ids)
    for first, second in ((dense, sparse), (sparse, dense), (read, dense)):
        with pytest.raises(ValueError, match="must both be tensors or both be policies"):
            project(first, second, kl_bound=0.05)
    with pytest.raises(ValueError, match="must share one support"):
        project(troll.log_probs_at(dense, sparse.token_ids.flip(-1)), sparse)
