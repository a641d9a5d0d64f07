"""DRPO and GMPO against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates.ratios import drpo, gmpo

ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0, -0.7, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("threshold", [12.5, 0.02])
def test_drpo_is_a_quadratic_penalty_of_the_change(threshold):
    """−A r + |A| p (r − 1)² / 2ε, of which the gradient in log p̃ is −A r (1 − sign(A) (p̃ − p)/ε)."""
    new, old, sampled = pair(distance=2.0)
    tokens = scored_tokens(new, old, sampled, advantages=ADVANTAGES)
    terms = drpo(tokens, settings(drpo_threshold=threshold))
    p, ratio = tokens.old_log_probs.exp(), (tokens.new_log_probs - tokens.old_log_probs).exp()
    assert terms.penalty is not None
    assert terms.log_ratio is None and terms.keep is None
    expected = ADVANTAGES.abs() * p * (ratio - 1).square() / (2 * threshold)
    torch.testing.assert_close(terms.penalty, expected, rtol=1e-10, atol=1e-14)
    loss = -ADVANTAGES * ratio + terms.penalty
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.new_log_probs)
    weight = 1 - ADVANTAGES.sign() * (ratio - 1) * p / threshold
    torch.testing.assert_close(gradient, -ADVANTAGES * ratio * weight, rtol=1e-9, atol=1e-13)
    # |p̃ − p| ≤ 1: the paper's threshold takes 8 % of a gradient at most, a small one turns some around.
    assert (weight >= 1 - 1 / 12.5).all() if threshold == 12.5 else (weight < 0).any()


def test_drpo_of_a_rare_token_that_became_likely_is_finite():
    """(r − 1)² is 1e39 here, above what float32 holds; times p it is 1e20."""
    new = torch.tensor([[0.0, -1.0]], requires_grad=True)
    tokens = scored_tokens(new, torch.tensor([[-45.0, 0.0]]), torch.tensor([0]))
    penalty = drpo(tokens, settings(drpo_threshold=12.5)).penalty
    assert penalty is not None
    (gradient,) = torch.autograd.grad(penalty.sum(), new)
    assert penalty.isfinite().all() and float(penalty) > 1e17
    assert gradient.isfinite().all() and gradient.any()


def test_gmpo_clips_where_the_advantage_pushes_out():
    log_ratio = torch.tensor([-0.9, -0.3, 0.3, 0.9] * 2, dtype=torch.float64)
    logits = torch.stack([log_ratio - 1.0, torch.log1p(-torch.exp(log_ratio - 1.0))], -1).requires_grad_()
    old = torch.tensor([[-1.0, float(torch.log1p(-torch.exp(torch.tensor(-1.0, dtype=torch.float64))))]])
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
    tokens = scored_tokens(logits, old.double().expand(8, 2), torch.zeros(8, dtype=torch.long), advantages=advantages)
    terms = gmpo(tokens, settings(gmpo_range=0.4))
    assert terms.log_ratio is not None
    assert terms.keep is None and terms.penalty is None
    expected = torch.tensor([-0.9, -0.3, 0.3, 0.4, -0.4, -0.3, 0.3, 0.9], dtype=torch.float64)
    torch.testing.assert_close(terms.log_ratio, expected, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(terms.log_ratio.sum(), tokens.new_log_probs)
    assert gradient.tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
