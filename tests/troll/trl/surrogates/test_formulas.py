"""Each surrogate against its formula on all outcomes in float64."""

import math
from typing import Any

import pytest
import torch

from tests.troll.trl import dense
from tests.troll.trl.surrogates.contract import assert_terms_of_no_token_are_empty
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates import NoSettings, formulas
from troll.trust_region.probabilities import LOG_FLOOR

DIRECTIONS = ("old_new", "new_old")
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0, -0.7, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("top_k", [4, 9])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kl_penalty_is_the_divergence_on_kept_outcomes(direction, top_k):
    new, old, sampled = pair()
    args, own = (
        settings(support_top_k=top_k, mass_threshold=0.0),
        formulas.KLPenaltySettings(weight=3.0, direction=direction),
    )

    def terms(logits: torch.Tensor) -> Any:
        tokens = scored_tokens(logits, old, sampled, top_k=top_k)
        return formulas.kl_penalty(tokens, args, own)

    expected = []
    for row in range(len(sampled)):
        log_new, log_old, _, kept = dense.outcomes(
            new[row].log_softmax(-1), old[row].log_softmax(-1), int(sampled[row]), args
        )
        assert kept == top_k
        of, to = (log_old, log_new) if direction == "old_new" else (log_new, log_old)
        expected.append((of.exp() * (of - to)).sum())
    kl, made = torch.stack(expected), terms(new)
    torch.testing.assert_close(made.penalty, 3 * kl, rtol=1e-9, atol=1e-12)
    assert made.log_ratio is None and made.keep is None and made.step is None
    assert torch.autograd.gradcheck(lambda logits: terms(logits).penalty, (new,))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kl_penalty_of_equal_and_of_excluded_outcomes(direction):
    """Equal policies have none; a token that p̃ excludes counts with the floor, and takes no gradient."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    moved = logits.clone()
    moved[1, 1] = -torch.inf
    moved.requires_grad_()
    tokens = scored_tokens(moved, logits, torch.tensor([0, 0]))
    terms: Any = formulas.kl_penalty(tokens, settings(), formulas.KLPenaltySettings(direction=direction))
    (gradient,) = torch.autograd.grad(terms.penalty.sum(), moved)
    assert terms.penalty[0] == 0 and gradient[0].abs().max() <= 1e-6
    p, p_new = logits[1].softmax(-1).double(), moved[1].detach().softmax(-1).double()
    if direction == "old_new":
        expected = float((p[[0, 2]] * (p / p_new).log()[[0, 2]]).sum() + p[1] * (p[1].log() - LOG_FLOOR))
    else:
        expected = float((p_new[[0, 2]] * (p_new / p).log()[[0, 2]]).sum())
    assert float(terms.penalty[1].detach()) == pytest.approx(expected, rel=1e-5)
    assert gradient.isfinite().all() and gradient[1, 1] == 0


@pytest.mark.parametrize("top_k", [4, 9])
@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_troll_with_a_proximal_pull_and_no_bound_is_a_kl_penalty(weight, top_k):
    """The loss and its gradient, of likely and of unlikely tokens; with weight 0 both are the raw ratio."""
    new, old, sampled = pair(distance=2.0)
    tokens = scored_tokens(new, old, sampled, kl_bound=math.inf, top_k=top_k)
    ours: Any = formulas.troll(tokens, settings(pull="proximal", regression_weight=weight), NoSettings())
    theirs: Any = formulas.kl_penalty(tokens, settings(), formulas.KLPenaltySettings(weight=weight))
    assert not ours.step.projected.any() and theirs.log_ratio is None
    assert torch.equal(ours.penalty, theirs.penalty)
    found = []
    for log_ratio, penalty in ((ours.log_ratio, ours.penalty), (tokens.log_ratio, theirs.penalty)):
        loss = (-log_ratio.exp() * ADVANTAGES + penalty).sum()
        found.append((loss, *torch.autograd.grad(loss, new, retain_graph=True)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)


def test_regression_is_the_pull_with_the_raw_ratio():
    new, old, sampled = pair()
    tokens = scored_tokens(new, old, sampled, kl_bound=0.01)
    args = settings(regression_weight=2.0)
    terms, troll = formulas.regression(tokens, args, NoSettings()), formulas.troll(tokens, args, NoSettings())
    assert terms.log_ratio is None and terms.step is not None and terms.step.projected.any()
    torch.testing.assert_close(terms.penalty, 2 * terms.step.regression, rtol=0, atol=0)
    torch.testing.assert_close(terms.penalty, troll.penalty, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["troll", "regression", "kl_penalty"])
def test_terms_of_no_token_are_empty(name):
    assert_terms_of_no_token_are_empty(name)


def test_a_kl_penalty_in_float32_is_accurate_near_the_old_policy():
    """KL of 1e-8 and below, where a difference of logarithms would be rounding."""
    old = torch.tensor([[2.0, 1.0, 0.0, -3.0]], dtype=torch.float64)
    new = old + torch.tensor([[1e-4, -1e-4, 2e-4, 0.0]], dtype=torch.float64)
    for direction in DIRECTIONS:
        own, found = formulas.KLPenaltySettings(direction=direction), []  # type: ignore[arg-type]
        for dtype in (torch.float64, torch.float32):
            tokens = scored_tokens(new.to(dtype), old.to(dtype), torch.tensor([0]))
            terms: Any = formulas.kl_penalty(tokens, settings(), own)
            found.append(float(terms.penalty))
        assert 0 < found[0] < 1e-8
        assert found[1] == pytest.approx(found[0], rel=0.05)
