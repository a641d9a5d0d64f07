"""Each surrogate that drops tokens, on closed forms; some of the masks in a trainer: test_surrogates.py."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from tests.troll.trl import dense
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.surrogates import SURROGATES, ScoredTokens, masks


def of_probabilities(new: list[float], old: list[float], **given: Any) -> ScoredTokens:
    """Tokens that have these probabilities; the rest of the mass is on one other token."""
    logits = [torch.tensor([[p, 1 - p] for p in probs], dtype=torch.float64).log() for probs in (new, old)]
    return scored_tokens(logits[0].requires_grad_(), logits[1], torch.zeros(len(new), dtype=torch.long), **given)


def of_log_ratios(log_ratios: list[float], **given: Any) -> ScoredTokens:
    """Tokens with these log ratios."""
    return of_probabilities([1e-3 * math.exp(x) for x in log_ratios], [1e-3] * len(log_ratios), **given)


def kept(terms: Any) -> list[bool]:
    """The mask of a surrogate that changes nothing else."""
    assert terms.log_ratio is None and terms.penalty is None
    keep: Tensor = terms.keep
    assert keep.dtype == torch.bool
    return keep.tolist()


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_sequence_finds_the_tokens_that_count():
    sequence, counts = torch.tensor([0, 0, 2, 2, 2, 5]), torch.tensor([1, 1, 0, 1, 1, 0]).bool()
    tokens = of_log_ratios([0.0] * 6, sequence=sequence, counts=counts)
    assert [at.tolist() for at in tokens.by_sequence()] == [[0, 1], [3, 4]]
    assert of_log_ratios([0.0], counts=torch.tensor([False])).by_sequence() == []


@pytest.mark.parametrize("name", ["icepop", "kpop", "trm", "m2po", "cppo"])
def test_masks_keep_all_tokens_of_equal_policies(name):
    _, old, sampled = pair()
    surrogate: Any = SURROGATES[name]
    for counts in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        tokens = scored_tokens(old, old, sampled, counts=counts)
        assert kept(surrogate.terms(tokens, settings(), surrogate.own())) == [True] * 6


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_icepop_drops_ratios_outside_the_range(advantage):
    ratios = [0.1, 0.49, 0.51, 1.0, 4.9, 5.1, 20.0]
    tokens = of_log_ratios([math.log(r) for r in ratios], advantages=torch.full((7,), advantage))
    assert kept(masks.icepop(tokens, settings(), masks.IcePopSettings())) == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert kept(masks.icepop(tokens, settings(), masks.IcePopSettings(lower=0.05, upper=math.inf))) == [True] * 7


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kpop_drops_tokens_that_are_far_in_either_direction(advantage):
    """The KL of probabilities 0.1 and 0.01 is 0.145 from the larger and 0.071 from the smaller."""
    new, old = [0.1, 0.01, 0.5, 0.7, 0.9, 1.0, 0.05], [0.01, 0.1, 0.5, 0.5, 0.5, 1.0, 1.0]
    tokens = of_probabilities(new, old, advantages=torch.full((7,), advantage))
    assert kept(masks.kpop(tokens, settings(), masks.KPopSettings())) == [False, False, True, True, False, True, False]
    for threshold, keeps in ((0.144, False), (0.145, True)):
        assert kept(masks.kpop(tokens, settings(), masks.KPopSettings(threshold=threshold)))[:2] == [keeps, keeps]


def test_trm_drops_whole_sequences():
    """(log r)²/2 is 2.42 for a log ratio of ±2.2, and 2.645 for ±2.3; a token that does not count decides nothing."""
    log_ratios = [0.1, 2.2, 0.1, -2.3, 0.0, 0.1, 2.5]
    sequence, counts = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()
    tokens = of_log_ratios(log_ratios, sequence=sequence, counts=counts)
    assert kept(masks.trm(tokens, settings(), masks.TRMSettings())) == [True, True, False, False, False, True, True]
    # r − 1 − log r is 5.8 for a log ratio of 2.2, and 1.4 for −2.3.
    k3 = kept(masks.trm(tokens, settings(), masks.TRMSettings(estimator="k3")))
    assert k3 == [False, False, True, True, True, True, True]


def test_m2po_drops_tokens_beyond_the_width_that_meets_the_threshold():
    """The second moment of log ratios 0.1, 0.2, 0.3 and 0.6 is 0.0325 if cut at 0.2, and 0.0575 if cut at 0.3."""
    log_ratios = [0.6, -0.1, 0.3, -0.2, -0.9, 0.9, 0.0, 0.5, 0.8]
    advantages = numbers(1, -1, 2, -1, 1, -1, 1, 0, 1)
    counts = torch.tensor([1] * 8 + [0]).bool()
    tokens = of_log_ratios(log_ratios, advantages=advantages, counts=counts)
    assert kept(masks.m2po(tokens, settings(), masks.M2POSettings())) == [False, True, False] + [True] * 6
    assert kept(masks.m2po(tokens, settings(), masks.M2POSettings(threshold=0.06)))[:4] == [False, True, True, True]
    assert kept(masks.m2po(tokens, settings(), masks.M2POSettings(threshold=0.126))) == [True] * 9
    assert kept(masks.m2po(tokens, settings(), masks.M2POSettings(threshold=0.009)))[:4] == [False] * 4


def test_m2po_is_a_clip_at_the_root_of_the_second_moment():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = (torch.randn(500, dtype=torch.float64, generator=generator) for _ in range(2))
    tokens = of_log_ratios((0.5 * log_ratio).tolist(), advantages=advantages)
    log_ratio = tokens.log_ratio.detach()
    leaving = log_ratio * advantages > 0
    square = log_ratio[leaving].square()
    width = brentq(lambda tau: float(square.clamp(max=tau**2).mean()) - 0.04, 0.0, 10.0)
    keep = kept(masks.m2po(tokens, settings(), masks.M2POSettings()))
    assert 0 < sum(keep) < 500
    loss = -torch.minimum(advantages * tokens.log_ratio.exp(), advantages * tokens.log_ratio.clamp(-width, width).exp())
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.new_log_probs)
    expected = torch.where(torch.tensor(keep), -advantages * log_ratio.exp(), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_m2po_of_impossible_tokens_drops_them_only():
    tokens = of_probabilities([0.11, 0.3, 0.1], [0.1, 0.0, 0.0], advantages=torch.ones(3))
    assert kept(masks.m2po(tokens, settings(), masks.M2POSettings())) == [True, False, False]


def test_cppo_is_stricter_for_early_tokens_and_after_a_prefix_that_moved():
    """With weights 1, 0.9, 0.8 and δ = 0.2: a change of 0.21 is far in the first place, and near in the last."""
    for changes, expected in (
        ([0.21, 0.0, 0.0], [False, True, True]),
        ([0.0, 0.0, 0.21], [True, True, True]),
        # The sum of z is 0.18, 0.342, 0.486; allowed are 0.2, 0.24, 0.276, since the quantile is above 2 δ_b.
        ([0.18, 0.18, 0.18], [True, False, False]),
        # The sum of z is 0.18, 0.18, 0.228, and the same is allowed.
        ([0.18, 0.0, 0.06], [True, True, True]),
    ):
        for advantage, keep in ((1.0, expected), (-1.0, [True] * 3)):
            moved, advantages = [0.3 + change for change in changes], torch.full((3,), advantage)
            tokens = of_probabilities(moved, [0.3] * 3, advantages=advantages)
            assert kept(masks.cppo(tokens, settings(), masks.CPPOSettings())) == keep


def test_cppo_is_its_definition_for_each_sequence():
    new, old, sampled = pair(tokens=60, distance=1.5)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(60, dtype=torch.float64, generator=generator)
    counts = torch.rand(60, generator=generator) < 0.8
    sequence = torch.arange(60) // 13
    tokens = scored_tokens(new, old, sampled, advantages=advantages, sequence=sequence, counts=counts)
    own = masks.CPPOSettings(threshold=0.15, last_weight=0.5, budget=0.03)
    keep = kept(masks.cppo(tokens, settings(), own))
    moved = (tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()).tolist()
    expected = [True] * 60
    for row in range(5):
        at = [i for i in range(60) if i // 13 == row and counts[i]]
        quantile = float(torch.tensor([abs(moved[i]) for i in at], dtype=torch.float64).quantile(0.9))
        spent = weights = 0.0
        for place, i in enumerate(at):
            weight = 1 - 0.5 * place / max(len(at) - 1, 1)
            change = weight * abs(moved[i])
            allowed = min(0.15, 0.15 + min(max(quantile, 0.03), 0.06) * weights - spent)
            expected[i] = change <= allowed or float(advantages[i]) * moved[i] <= 0
            spent, weights = spent + change, weights + weight
    assert keep == expected
    assert not all(keep)


@pytest.mark.parametrize("outcomes", ["binary", "top_k"])
@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_dppo_masks_what_is_far_and_leaving(kind, outcomes):
    """Far on the sampled token and the rest, or on what TROLL projects: supports and tail."""
    new, old, sampled = pair(tokens=60, vocab=12)
    advantages = torch.tensor([1.0, -1.0] * 30, dtype=torch.float64)
    args = settings(support_top_k=4, mass_threshold=0.0)
    tokens = scored_tokens(new, old, sampled, advantages=advantages, top_k=4)
    expected, threshold = [], 0.1
    for row in range(60):
        log_new, log_old, token = new[row].detach().log_softmax(-1), old[row].log_softmax(-1), int(sampled[row])
        leaving = float(log_new[token] - log_old[token]) * float(advantages[row]) > 0
        if outcomes == "binary":
            log_new, log_old = (torch.stack([x[token].exp(), 1 - x[token].exp()]).log() for x in (log_new, log_old))
        else:
            log_new, log_old, _, _ = dense.outcomes(log_new, log_old, token, args)
        kl = (log_old.exp() * (log_old - log_new)).sum()
        variation = (log_new.exp() - log_old.exp()).abs().sum() / 2
        expected.append(not (leaving and float(variation if kind == "dppo_tv" else kl) > threshold))
    surrogate: Any = SURROGATES[kind]
    own = surrogate.own(threshold=threshold, outcomes=outcomes)
    assert kept(surrogate.terms(tokens, args, own)) == expected
    assert 0 < sum(expected) < 60


def test_dppo_of_certain_tokens_has_finite_divergences():
    """Log-probabilities of 0 and slightly above it, as rounding makes them, and far below."""
    tokens = dataclasses.replace(
        of_log_ratios([0.0] * 5, advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0])),
        old_log_probs=torch.tensor([0.0, 1e-7, -1e-9, -80.0, 0.0]),
        new_log_probs=torch.tensor([-5.0, 0.0, -3.0, 0.0, 0.0]),
    )
    # Far and leaving; equal; far, but coming back (A > 0 and r < 1); far and leaving; equal.
    for terms in (
        masks.dppo_kl(tokens, settings(), masks.DPPOKLSettings()),
        masks.dppo_tv(tokens, settings(), masks.DPPOTVSettings()),
    ):
        assert kept(terms) == [False, True, True, False, True]


def test_ipo_drops_what_has_moved_in_either_direction():
    new, old = [0.85, 0.15, 0.75, 0.25, 0.25, 0.4], [0.5, 0.5, 0.5, 0.5, 0.01, 0.01]
    for advantage in (1.0, -1.0):
        tokens = of_probabilities(new, old, advantages=torch.full((6,), advantage))
        terms = masks.ipo(tokens, settings(), masks.IPOSettings(threshold=0.3, kl_weight=0.0))
        assert kept(terms) == [False, False, True, True, True, False]


def test_ipo_penalises_squared_log_ratios_of_all_tokens():
    tokens = scored_tokens(*pair())
    terms: Any = masks.ipo(tokens, settings(), masks.IPOSettings(threshold=0.01, kl_weight=0.5))
    assert not terms.keep.all()
    log_ratio = (tokens.new_log_probs - tokens.old_log_probs).detach()
    torch.testing.assert_close(terms.penalty, 0.5 * log_ratio.square(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(terms.penalty.sum(), tokens.new_log_probs)
    torch.testing.assert_close(gradient, log_ratio, rtol=1e-12, atol=0)
