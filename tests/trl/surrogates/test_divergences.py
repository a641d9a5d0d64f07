"""Surrogates on whole distributions, against their formulas on all outcomes in float64."""

from __future__ import annotations

import pytest
import torch

from tests.trl import dense
from tests.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates.divergences import kl_penalty, regression, troll
from troll.trust_region.policy.values import LOG_FLOOR

DIRECTIONS = ("old_new", "new_old")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kl_penalty_is_the_divergence_and_its_gradient(direction):
    """In the logits of p̃: β (p̃ − p) for KL(p ‖ p̃), and β p̃ (log p̃/p − KL) for KL(p̃ ‖ p)."""
    new, old, sampled = pair()
    tokens = scored_tokens(new, old, sampled, kl_penalty_weight=3.0)
    terms = kl_penalty(tokens, settings(kl_penalty_direction=direction))
    log_p, log_new = old.log_softmax(-1), new.detach().log_softmax(-1)
    p, p_new, s = log_p.exp(), log_new.exp(), log_new - log_p
    if direction == "old_new":
        kl, gradient = -(p * s).sum(-1), p_new - p
    else:
        kl = (p_new * s).sum(-1)
        gradient = p_new * (s - kl.unsqueeze(-1))
    assert terms.penalty is not None and terms.penalised_kl is not None
    assert terms.log_ratio is None and terms.keep is None and terms.step is None
    assert not terms.penalised_kl.requires_grad
    torch.testing.assert_close(terms.penalised_kl, kl, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(terms.penalty, 3 * kl, rtol=1e-10, atol=1e-12)
    (actual,) = torch.autograd.grad(terms.penalty.sum(), new)
    torch.testing.assert_close(actual, 3 * gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kl_penalty_on_the_outcomes_that_are_kept(direction, tail):
    new, old, sampled = pair(vocab=12)
    args = settings(kl_penalty_direction=direction, tail=tail, support_top_k=4, mass_threshold=0.0)

    def penalty(logits: torch.Tensor) -> torch.Tensor:
        terms = kl_penalty(scored_tokens(logits, old, sampled, top_k=4, tail=tail), args)
        assert terms.penalty is not None
        return terms.penalty

    expected = []
    for row in range(len(sampled)):
        log_new, log_old, _, kept = dense.outcomes(
            new[row].log_softmax(-1), old[row].log_softmax(-1), int(sampled[row]), args
        )
        assert kept == 4
        of, to = (log_old, log_new) if direction == "old_new" else (log_new, log_old)
        expected.append((of.exp() * (of - to)).sum())
    torch.testing.assert_close(penalty(new), torch.stack(expected), rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(penalty, (new,))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kl_penalty_of_equal_and_of_excluded_outcomes(direction):
    """Equal policies have none; a token that p̃ excludes counts with the floor, and takes no gradient."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    moved = logits.clone()
    moved[1, 1] = -torch.inf
    moved.requires_grad_()
    tokens = scored_tokens(moved, logits, torch.tensor([0, 0]))
    terms = kl_penalty(tokens, settings(kl_penalty_direction=direction))
    assert terms.penalty is not None
    (gradient,) = torch.autograd.grad(terms.penalty.sum(), moved)
    assert terms.penalty[0] == 0
    assert gradient[0].abs().max() <= 1e-6
    p, p_new = logits[1].softmax(-1).double(), moved[1].detach().softmax(-1).double()
    if direction == "old_new":
        expected = float((p[[0, 2]] * (p / p_new).log()[[0, 2]]).sum() + p[1] * (p[1].log() - LOG_FLOOR))
    else:
        expected = float((p_new[[0, 2]] * (p_new / p).log()[[0, 2]]).sum())
    assert float(terms.penalty[1].detach()) == pytest.approx(expected, rel=1e-5)
    assert gradient.isfinite().all()
    assert gradient[1, 1] == 0


@pytest.mark.parametrize("weight", [0.0, 1.0, 10.0])
def test_the_regression_is_trolls_pull_with_the_raw_ratio(weight):
    new, old, sampled = pair()
    tokens, args = scored_tokens(new, old, sampled), settings(regression_weight=weight)
    ours, theirs = regression(tokens, args), troll(tokens, args)
    assert ours.log_ratio is None and ours.keep is None
    assert ours.penalty is not None and theirs.penalty is not None and ours.step is not None
    assert ours.step.projected.any()
    assert torch.equal(ours.penalty, theirs.penalty)
    (gradient,) = torch.autograd.grad(ours.penalty.sum(), new)
    reference = new.detach().clone().requires_grad_()
    dense_args = settings(kl_bound=0.05, support_top_k=9, mass_threshold=0.0)
    expected = sum(dense.token(reference[i], old[i], int(sampled[i]), dense_args).regression for i in range(len(old)))
    (expected_gradient,) = torch.autograd.grad(weight * expected, reference)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_a_kl_penalty_in_float32_is_accurate_near_the_old_policy():
    """KL of 1e-8 and below, where a difference of logarithms would be rounding."""
    old = torch.tensor([[2.0, 1.0, 0.0, -3.0]], dtype=torch.float64)
    new = old + torch.tensor([[1e-4, -1e-4, 2e-4, 0.0]], dtype=torch.float64)
    for direction in DIRECTIONS:
        args, found = settings(kl_penalty_direction=direction), []
        for dtype in (torch.float64, torch.float32):
            kl = kl_penalty(scored_tokens(new.to(dtype), old.to(dtype), torch.tensor([0])), args).penalised_kl
            assert kl is not None
            found.append(float(kl))
        assert 0 < found[0] < 1e-8
        assert found[1] == pytest.approx(found[0], rel=0.05)
