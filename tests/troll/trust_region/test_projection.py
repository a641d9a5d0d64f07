"""project(): the root, the numbers of DESIGN.md, the closed-form backward, invariances; of tensors and of policies."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import troll
from tests.tolerance import EPS
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import (
    FAMILIES,
    array,
    assert_log_probs,
    bounds,
    capture_rows,
    kl_of_logits,
    pairs,
    random_logits,
    tensor,
    true_kl,
)
from troll import Projection, SparsePolicy, project

#: Of these the variance of s is too small for six digits of a gradient.
NO_SIX_DIGITS = ("near_deterministic", "nearly_disjoint")


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_projection_agrees_with_scipy(family, size):
    old, new = pairs(family, 40, size)
    kl_bound = bounds(40, low=5e-3)
    kl_bound[::7] = np.inf
    logits, upstream = tensor(new).requires_grad_(), array(random_logits(40, size, seed=3))
    projection = project(logits, tensor(old), kl_bound=tensor(kl_bound))
    expected = [reference.project(n, o, e) for o, n, e in zip(old, new, kl_bound, strict=True)]
    assert isinstance(projection, Projection)
    assert projection.log_probs.shape == (40, size)
    assert projection.projected.dtype == torch.bool
    assert projection.projected.tolist() == [row.solution.projected for row in expected]
    np.testing.assert_allclose(
        array(projection.kl_before), [row.solution.kl_before for row in expected], rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(
        array(projection.kl_after), [row.solution.kl_after for row in expected], rtol=0, atol=1e-9
    )

    was_projected = array(projection.projected)
    error = np.abs(true_kl(array(projection.log_probs), old) - kl_bound)[was_projected]
    assert error.size == 0 or error.max() <= 1e-9
    finite = projection.log_probs > -math.inf
    torch.where(finite, projection.log_probs, 0.0).backward(gradient=tensor(upstream))
    assert logits.grad is not None
    for b, row in enumerate(expected):
        if family not in NO_SIX_DIGITS:
            gradient = row.gradient(np.where(np.isfinite(row.log_probs), upstream[b], 0.0))
            np.testing.assert_allclose(array(logits.grad[b]), gradient, rtol=1e-6, atol=1e-6)
        assert_log_probs(array(projection.log_probs[b]), row)
        if row.solution.projected:
            # τ is known as well as the bound is met: to kl_error / (τ σ²).
            tau = 1.0 / (1.0 + projection.multiplier[b].item())
            _, variance = reference.moments(row.solution.log_q, row.outcomes.log_new - row.outcomes.log_old)
            slope = row.solution.tau * variance
            assert abs(tau - row.solution.tau) <= 1e-9 * row.solution.tau + 1e-9 / slope
        else:
            assert projection.multiplier[b].item() == 0.0


@pytest.mark.parametrize("family", ["flat", "near_deterministic"])
def test_projection_of_large_vocabulary_meets_bound(family):
    old, new = pairs(family, 2, 20_000)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3 * 0.05)):
        projection = project(tensor(new, dtype), tensor(old, dtype), kl_bound=0.05)
        for b in range(2):
            row = reference.project(array(tensor(new, dtype)[b]), array(tensor(old, dtype)[b]), 0.05)
            assert bool(projection.projected[b]) == row.solution.projected
            assert projection.kl_before[b].item() == pytest.approx(row.solution.kl_before, rel=1e-4)
            if row.solution.projected:
                after = true_kl(array(projection.log_probs[b : b + 1]), array(tensor(old, dtype)[b : b + 1]))
                assert abs(after[0] - 0.05) <= tolerance


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (7, torch.float16), (150, torch.float32)])
@pytest.mark.parametrize("family", FAMILIES)
def test_projection_in_float32_meets_bound(family, size, dtype):
    """Judged in float64 from the very logits that went in; half precision is computed in float32."""
    old, new = (tensor(x, dtype) for x in pairs(family, 40, size, seed=1))
    kl_bound = bounds(40, seed=1)
    projection = project(new, old, kl_bound=tensor(kl_bound, torch.float32))
    assert projection.log_probs.dtype == projection.kl_after.dtype == torch.float32
    kl_bound = array(tensor(kl_bound, torch.float32))

    before = kl_of_logits(array(new), array(old))
    was_projected = array(projection.projected)
    after = np.where(was_projected, true_kl(array(projection.log_probs), array(old)), before)
    assert (after <= kl_bound * (1 + 1e-3)).all()
    assert (np.abs(after - kl_bound) <= 1e-3 * kl_bound)[was_projected].all()
    assert was_projected[before > kl_bound * (1 + 1e-3)].all()
    total = torch.logsumexp(projection.log_probs.double(), -1)
    # Some roundings of a normaliser of up to log 150, which all log-probabilities have in common.
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=4 * EPS * math.log(150))
    np.testing.assert_allclose(array(projection.kl_after), after, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(array(projection.kl_before), before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("size", [1, 5])
def test_projection_has_shape_of_positions(shape, size):
    new = random_logits(*shape, size).requires_grad_()
    projection = project(new, random_logits(*shape, size, seed=1), kl_bound=0.05)
    assert projection.log_probs.shape == (*shape, size)
    for name in ("multiplier", "kl_before", "kl_after", "projected", "iterations"):
        assert getattr(projection, name).shape == shape, name
    projection.log_probs.sum().backward()
    assert new.grad is not None and new.grad.shape == new.shape


def test_projection_gradients_of_degenerate_are_finite():
    for dtype in (torch.float32, torch.float64):
        for size in (2, 3, 20):
            for family in ("near_deterministic", "nearly_disjoint", "masked"):
                old, new = (tensor(x, dtype) for x in pairs(family, 200, size, seed=4))
                logits = new.requires_grad_()
                log_probs = project(logits, old, kl_bound=0.05).log_probs
                (gradient,) = torch.autograd.grad(log_probs[log_probs > -math.inf].sum(), logits)
                assert gradient.isfinite().all()


def test_projection_numbers_carry_no_gradient():
    new, old = random_logits(4, 6).requires_grad_(), random_logits(4, 6, seed=1).requires_grad_()
    projection = project(new, old, kl_bound=0.05)
    for name in ("multiplier", "kl_before", "kl_after"):
        assert not getattr(projection, name).requires_grad, name
    projection.log_probs.sum().backward()
    assert old.grad is None or not old.grad.any()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 3)])
def test_projection_bounds_broadcast(shape):
    old, new = random_logits(2, 3, 6), random_logits(2, 3, 6, seed=1)
    kl_bound = 0.01 + 0.1 * torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    full = project(new, old, kl_bound=kl_bound.expand(2, 3).contiguous())
    assert torch.equal(project(new, old, kl_bound=kl_bound).log_probs, full.log_probs)


LOGITS = st.lists(
    st.tuples(*[st.one_of(st.floats(-40, 40), st.sampled_from([0.0, -math.inf]))] * 2), min_size=1, max_size=9
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=LOGITS, exponent=st.floats(-3, 0))
def test_projection_of_any_pair_is_the_reference(rows, exponent):
    old, new = np.array(rows).T.reshape(2, -1)
    assume(reference.is_finite_row(old) and reference.is_finite_row(new))
    kl_bound = 10.0**exponent
    row = reference.project(new, old, kl_bound)
    assume(abs(row.solution.kl_before - kl_bound) > 1e-9)
    projection = project(tensor(new), tensor(old), kl_bound=kl_bound)
    assert bool(projection.projected) == row.solution.projected
    assert projection.kl_before.item() == pytest.approx(row.solution.kl_before, rel=1e-9, abs=1e-12)
    if row.solution.projected:
        after = true_kl(array(projection.log_probs)[None], old[None])[0]
        assert abs(after - kl_bound) <= 1e-9


@pytest.mark.parametrize("side", ["new", "old"])
def test_projection_of_broken_rows_is_nan(side):
    old, new = random_logits(6, 5), random_logits(6, 5, seed=1)
    clean = project(new, old, kl_bound=0.05)
    target = new if side == "new" else old
    target[1, 2] = math.nan
    target[2, 0] = math.inf
    target[3] = -math.inf
    logits = new.requires_grad_()
    projection = project(logits, old, kl_bound=0.05)
    assert projection.kl_before[1:4].isnan().all()
    assert projection.log_probs[1:4].isnan().all()
    fine = torch.tensor([0, 4, 5])
    assert torch.equal(projection.log_probs[fine], clean.log_probs[fine])
    (gradient,) = torch.autograd.grad(projection.log_probs[fine].sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("kl_bound", {"kl_bound": 0.0}),
        ("kl_bound", {"kl_bound": -0.1}),
        ("kl_bound", {"kl_bound": math.nan}),
        ("kl_bound", {"kl_bound": torch.tensor([0.1, 0.0])}),
        ("kl_bound", {"kl_bound": torch.tensor([0.1, math.nan])}),
        ("kl_bound", {"kl_bound": torch.tensor([0.1, 0.1, 0.1])}),
        ("kl_bound", {"kl_bound": torch.full((2, 2), 0.1)}),
        ("old_log_probs", {"old_log_probs": torch.zeros(2, 5)}),
        ("old_log_probs", {"old_log_probs": torch.zeros(3, 4)}),
    ],
)
def test_projection_refuses_bad_arguments(argument, change):
    arguments = {"new_log_probs": torch.zeros(2, 4), "old_log_probs": torch.zeros(2, 4), "kl_bound": 0.05} | change
    with pytest.raises(ValueError, match=argument):
        project(**arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("top_k", "threshold"), [(1, 0.0), (5, 1e-2), (30, 0.0)])
def test_projection_of_policies_agrees_with_reference(family, top_k, threshold):
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
        if family not in NO_SIX_DIGITS:
            expected = row.gradient(np.where(np.isfinite(row.log_probs), upstream[b][where], 0.0))
            np.testing.assert_allclose(array(logits.grad[b]), expected, rtol=1e-6, atol=1e-6)


def test_projection_takes_policies_captured_or_read():
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


def test_projection_gives_read_old_policy_no_gradient():
    logits, old_logits = random_logits(5, 9).requires_grad_(), random_logits(5, 9, seed=1).requires_grad_()
    ids = torch.arange(4).expand(5, 4)
    projection = project(troll.log_probs_at(logits, ids), troll.log_probs_at(old_logits, ids), 0.05)
    assert projection.projected.any()
    (projection.log_probs * random_logits(5, 5, seed=2)).sum().backward()
    assert logits.grad is not None and logits.grad.any()
    assert old_logits.grad is None or not old_logits.grad.any()


def test_projection_of_half_precision_is_float32():
    old_logits, new_logits = (tensor(x) for x in pairs("flat", 20, 12, seed=10))
    old = troll.capture(old_logits, torch.zeros(20, dtype=torch.int64), top_k=5).to(torch.bfloat16)
    new = troll.log_probs_at(new_logits, old.token_ids)
    halved = dataclasses.replace(new, logits=new.logits.bfloat16(), tail_logit=new.tail_logit.bfloat16())
    projection = project(halved, old, 0.05)
    assert projection.log_probs.dtype == projection.kl_after.dtype == torch.float32
    assert projection.projected.any()
    after = projection.kl_after[projection.projected]
    torch.testing.assert_close(after, torch.full_like(after, 0.05), rtol=1e-3, atol=0)


def test_projection_refuses_two_kinds_or_supports():
    dense: Any = torch.zeros(2, 4)
    sparse: Any = troll.capture(dense, torch.zeros(2, dtype=torch.int64))
    read: Any = troll.log_probs_at(dense, sparse.token_ids)
    for first, second in ((dense, sparse), (sparse, dense), (read, dense)):
        with pytest.raises(ValueError, match="must both be tensors or both be policies"):
            project(first, second, kl_bound=0.05)
    with pytest.raises(ValueError, match="must share one support"):
        project(troll.log_probs_at(dense, sparse.token_ids.flip(-1)), sparse)
    padded = troll.log_probs_at(torch.zeros(2, 6), sparse.token_ids)
    with pytest.raises(ValueError, match="must have one vocabulary, got 6 and 4 tokens"):
        project(padded, sparse)
    with pytest.raises(ValueError, match="must have one vocabulary, got 6 and 4 tokens"):
        troll.trust_region_step(padded, sparse)
