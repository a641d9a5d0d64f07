"""The paper's step against the reference, and against ours where the two have to agree or differ."""

import math

import numpy as np
import pytest
import torch

import troll
from tests.troll.trust_region import reference
from tests.troll.trust_region.cases import FAMILIES, array, bounds, pairs, tensor, true_kl
from troll import Truncation
from troll.trust_region.dual import TokenCurve, newton
from troll.trust_region.paper import bracket, paper_step


def test_paper_step_is_ours_where_policies_are_peaked():
    """Ten tokens have all but 1e-13 of the mass, as in large models: what is outside is too little to matter."""
    generator = torch.Generator().manual_seed(0)
    old_logits = torch.full((60, 300), -36.0, dtype=torch.float64)
    old_logits[:, :10] = 2 * torch.randn(60, 10, generator=generator, dtype=torch.float64)
    new_logits = old_logits + 0.5 * torch.randn(60, 300, generator=generator, dtype=torch.float64)
    old = troll.capture(old_logits, old_logits.argmax(-1), top_k=64)
    ours, theirs = troll.trust_region_step(new_logits, old), paper_step(new_logits, old)
    assert ours.projected.any() and not ours.projected.all()
    for name in ("log_ratio", "kl_before", "kl_after", "regression", "multiplier"):
        # What the threshold of 1e-5 drops is a bucket with its mass in ours, and 1e-12 in the paper's.
        torch.testing.assert_close(getattr(theirs, name), getattr(ours, name), rtol=2e-3, atol=2e-4)


def test_paper_step_sees_more_kl_where_policies_are_flat():
    """Most of the mass is outside, and the policies differ by 0.001: the paper's step sees over 200 times that."""
    generator = torch.Generator().manual_seed(0)
    old_logits = torch.randn(50, 2000, generator=generator, dtype=torch.float64)
    new_logits = old_logits + 0.045 * torch.randn(50, 2000, generator=generator, dtype=torch.float64)
    log_old, log_new = (torch.log_softmax(x, -1) for x in (old_logits, new_logits))
    true = (log_new.exp() * (log_new - log_old)).sum(-1)
    old = troll.capture(old_logits, old_logits.argmax(-1), top_k=64, mass_threshold=0.0)
    assert old.tail_log_prob.exp().mean() > 0.75
    assert true.mean().item() == pytest.approx(1e-3, rel=0.1)
    assert (troll.trust_region_step(new_logits, old).kl_before <= true).all()
    assert paper_step(new_logits, old).kl_before.mean() > 200 * true.mean()


def test_paper_step_of_broken_rows_is_nan():
    generator = torch.Generator().manual_seed(7)
    old_logits, new_logits = (torch.randn(6, 12, generator=generator) for _ in range(2))
    old = troll.capture(old_logits, torch.arange(6), top_k=4)
    clean = paper_step(new_logits, old)
    new_logits[1, 8], new_logits[2, 9], new_logits[3] = math.nan, math.inf, -math.inf
    logits = new_logits.clone().requires_grad_()
    step = paper_step(logits, old)
    fine = torch.tensor([0, 4, 5])
    for name in ("log_ratio", "regression", "kl_before"):
        assert getattr(step, name)[1:4].isnan().all()
        torch.testing.assert_close(getattr(step, name)[fine], getattr(clean, name)[fine], rtol=0, atol=0)
    assert not step.projected[1:4].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 40])
def test_bracket_reaches_the_bound(family, size):
    """Held to the numbers of DESIGN.md for ε ≥ 0.01 where η ≤ 1e2 is enough; feasible below, too."""
    old, new = pairs(family, 30, size, seed=13)
    log_old, log_new = (
        tensor(np.array([reference.floored(reference.log_softmax(x)) for x in rows])) for rows in (old, new)
    )
    for low, accurate in ((1e-2, True), (1e-4, False)):
        kl_bound = bounds(30, low=low, seed=13)
        rows = [reference.project(n, o, e) for n, o, e in zip(new, old, kl_bound, strict=True)]
        reachable = np.array([row.solution.projected and row.solution.multiplier <= 99 for row in rows])
        if not reachable.any():  # of nearly equal policies, few are projected at all
            assert family == "nearly_equal"
            continue
        for dtype, relative in ((torch.float64, 0.0), (torch.float32, 1e-3)):
            p, s = (x[reachable].to(dtype) for x in (log_old, log_new - log_old))
            bound = tensor(kl_bound, dtype)[reachable]
            tau = bracket(TokenCurve(p, s), bound)
            log_q = torch.log_softmax(p.double() + tau.double().unsqueeze(-1) * s.double(), -1)
            after, wanted = true_kl(array(log_q), array(p)), array(bound)
            assert (after <= wanted * (1 + relative) + 1e-9).all()
            if accurate:
                assert (np.abs(after - wanted) <= relative * wanted + 1e-9).all()
            assert (1 / tau - 1 <= 100.0 * (1 + 1e-6)).all()


def test_bracket_stops_at_its_largest_multiplier():
    old = torch.full((1, 3), -math.log(3), dtype=torch.float64)
    new = torch.log_softmax(torch.tensor([[27.0, 0.0, -27.0]], dtype=torch.float64), -1)
    bound = torch.full((1,), 1e-4, dtype=torch.float64)
    curve = TokenCurve(old, new - old)
    tau = bracket(curve, bound)
    assert (1 / tau - 1).item() == pytest.approx(100.0)
    assert curve.at(tau).kl.item() > 1e-4
    exact = newton(TokenCurve(old, new - old), bound).tau
    assert (1 / exact - 1).item() > 100.0


def test_paper_step_refuses_arguments_that_do_not_fit():
    old = troll.capture(torch.zeros(2, 8), torch.tensor([0, 1]), top_k=3, mass_threshold=0.0)
    with pytest.raises(ValueError, match="kl_bound must be above 0"):
        paper_step(torch.zeros(2, 8), old, 0.0)
    with pytest.raises(ValueError, match=r"old must hold the positions \(3\), got \(2\)"):
        paper_step(torch.zeros(3, 8), old)
    with pytest.raises(ValueError, match=r"logits must be \(2, 8\)"):
        paper_step(torch.zeros(2, 7), old)
    kept = troll.capture(torch.zeros(2, 8), torch.tensor([0, 1]), truncation=Truncation(top_k=3))
    with pytest.raises(ValueError, match="old must not be truncated"):
        paper_step(torch.zeros(2, 8), kept)
