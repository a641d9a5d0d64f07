"""The surrogates of other papers: each on closed forms, and what holds for every surrogate."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor
from trl.experimental.gmpo import GMPOTrainer

from tests.troll.trl import dense, tiny
from tests.troll.trl.surrogates import contract
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from troll.trl.old_policy import OLD_POLICY
from troll.trl.surrogates import SURROGATES, KLPenaltySettings, ScoredTokens, kl_penalty
from troll_lab import rivals

RIVALS = ("dppo_tv", "dppo_kl", "drpo", "ipo", "icepop", "kpop", "trm", "m2po", "cppo", "gmpo", "bounded_kl_penalty")


def of_probabilities(new: list[float], old: list[float], **given: Any) -> ScoredTokens:
    """Tokens that have these probabilities; the rest of the mass is on one other token."""
    logits = [torch.tensor([[p, 1 - p] for p in probs], dtype=torch.float64).log() for probs in (new, old)]
    return scored_tokens(logits[0].requires_grad_(), logits[1], torch.zeros(len(new), dtype=torch.long), **given)


def of_log_ratios(log_ratios: list[float], **given: Any) -> ScoredTokens:
    """Tokens with these log ratios."""
    return of_probabilities([1e-3 * math.exp(x) for x in log_ratios], [1e-3] * len(log_ratios), **given)


def kept(terms: Any) -> str:
    """The mask of a surrogate that changes nothing else, a 1 for each token that it keeps."""
    assert terms.log_ratio is None and terms.penalty is None
    keep: Tensor = terms.keep
    assert keep.dtype == torch.bool
    return digits(keep.tolist())


def digits(keep: list[bool]) -> str:
    return "".join(str(int(each)) for each in keep)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", ["icepop", "kpop", "trm", "m2po", "cppo"])
def test_masks_keep_all_tokens_of_equal_policies(name):
    _, old, sampled = pair()
    surrogate: Any = SURROGATES[name]
    for counts in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        tokens = scored_tokens(old, old, sampled, counts=counts)
        assert kept(surrogate.terms(tokens, settings(), surrogate.own())) == "111111"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_icepop_drops_ratios_outside_the_range(advantage):
    ratios = [0.1, 0.49, 0.51, 1.0, 4.9, 5.1, 20.0]
    tokens = of_log_ratios([math.log(r) for r in ratios], advantages=torch.full((7,), advantage))
    assert kept(rivals.icepop(tokens, settings(), rivals.IcePopSettings())) == "0011100"
    assert kept(rivals.icepop(tokens, settings(), rivals.IcePopSettings(lower=0.05, upper=math.inf))) == "1111111"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kpop_drops_tokens_that_are_far_in_either_direction(advantage):
    """The KL of probabilities 0.1 and 0.01 is 0.145 from the larger and 0.071 from the smaller."""
    new, old = [0.1, 0.01, 0.5, 0.7, 0.9, 1.0, 0.05], [0.01, 0.1, 0.5, 0.5, 0.5, 1.0, 1.0]
    tokens = of_probabilities(new, old, advantages=torch.full((7,), advantage))
    assert kept(rivals.kpop(tokens, settings(), rivals.KPopSettings())) == "0011010"
    for threshold, first in ((0.144, "00"), (0.145, "11")):
        assert kept(rivals.kpop(tokens, settings(), rivals.KPopSettings(threshold=threshold)))[:2] == first


def test_trm_drops_whole_sequences():
    """(log r)²/2 is 2.42 for a log ratio of ±2.2, and 2.645 for ±2.3; a token that does not count decides nothing."""
    log_ratios = [0.1, 2.2, 0.1, -2.3, 0.0, 0.1, 2.5]
    sequence, counts = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()
    tokens = of_log_ratios(log_ratios, sequence=sequence, counts=counts)
    assert kept(rivals.trm(tokens, settings(), rivals.TRMSettings())) == "1100011"
    # r − 1 − log r is 5.8 for a log ratio of 2.2, and 1.4 for −2.3.
    assert kept(rivals.trm(tokens, settings(), rivals.TRMSettings(estimator="k3"))) == "0011111"


@pytest.mark.parametrize(
    ("threshold", "keep"), [(0.04, "010111111"), (0.06, "011111111"), (0.126, "111111111"), (0.009, "000011111")]
)
def test_m2po_drops_tokens_beyond_the_width_of_its_threshold(threshold, keep):
    """The second moment of log ratios 0.1, 0.2, 0.3 and 0.6 is 0.0325 if cut at 0.2, and 0.0575 if cut at 0.3."""
    log_ratios = [0.6, -0.1, 0.3, -0.2, -0.9, 0.9, 0.0, 0.5, 0.8]
    advantages = numbers(1, -1, 2, -1, 1, -1, 1, 0, 1)
    tokens = of_log_ratios(log_ratios, advantages=advantages, counts=torch.tensor([1] * 8 + [0]).bool())
    assert rivals.M2POSettings().threshold == 0.04
    assert kept(rivals.m2po(tokens, settings(), rivals.M2POSettings(threshold=threshold))) == keep


def test_m2po_is_a_clip_at_the_root_of_the_second_moment():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = (torch.randn(500, dtype=torch.float64, generator=generator) for _ in range(2))
    tokens = of_log_ratios((0.5 * log_ratio).tolist(), advantages=advantages)
    log_ratio = tokens.log_ratio.detach()
    leaving = log_ratio * advantages > 0
    square = log_ratio[leaving].square()
    width = brentq(lambda tau: float(square.clamp(max=tau**2).mean()) - 0.04, 0.0, 10.0)
    keep: Any = rivals.m2po(tokens, settings(), rivals.M2POSettings()).keep
    assert 0 < int(keep.sum()) < 500
    loss = -torch.minimum(advantages * tokens.log_ratio.exp(), advantages * tokens.log_ratio.clamp(-width, width).exp())
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.new_log_probs)
    expected = torch.where(keep, -advantages * log_ratio.exp(), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_m2po_of_impossible_tokens_drops_them_only():
    tokens = of_probabilities([0.11, 0.3, 0.1], [0.1, 0.0, 0.0], advantages=torch.ones(3))
    assert kept(rivals.m2po(tokens, settings(), rivals.M2POSettings())) == "100"


@pytest.mark.parametrize(
    ("changes", "keep"),
    [
        # With weights 1, 0.9, 0.8 and δ = 0.2: a change of 0.21 is far in the first place, and near in the last.
        ([0.21, 0.0, 0.0], "011"),
        ([0.0, 0.0, 0.21], "111"),
        # The sum of z is 0.18, 0.342, 0.486; allowed are 0.2, 0.24, 0.276, since the quantile is above 2 δ_b.
        ([0.18, 0.18, 0.18], "100"),
        # The sum of z is 0.18, 0.18, 0.228, and the same is allowed.
        ([0.18, 0.0, 0.06], "111"),
    ],
)
def test_cppo_is_stricter_for_early_tokens_and_moved_prefixes(changes, keep):
    for advantage, expected in ((1.0, keep), (-1.0, "111")):
        tokens = of_probabilities([0.3 + c for c in changes], [0.3] * 3, advantages=torch.full((3,), advantage))
        assert kept(rivals.cppo(tokens, settings(), rivals.CPPOSettings())) == expected


def test_cppo_is_its_definition_for_each_sequence():
    new, old, sampled = pair(tokens=60, distance=1.5)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(60, dtype=torch.float64, generator=generator)
    counts = torch.rand(60, generator=generator) < 0.8
    sequence = torch.arange(60) // 13
    tokens = scored_tokens(new, old, sampled, advantages=advantages, sequence=sequence, counts=counts)
    own = rivals.CPPOSettings(threshold=0.15, last_weight=0.5, budget=0.03)
    keep = kept(rivals.cppo(tokens, settings(), own))
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
    assert keep == digits(expected)
    assert "0" in keep


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
    assert kept(surrogate.terms(tokens, args, own)) == digits(expected)
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
        rivals.dppo_kl(tokens, settings(), rivals.DPPOKLSettings()),
        rivals.dppo_tv(tokens, settings(), rivals.DPPOTVSettings()),
    ):
        assert kept(terms) == "01101"


def test_ipo_drops_what_has_moved_in_either_direction():
    new, old = [0.85, 0.15, 0.75, 0.25, 0.25, 0.4], [0.5, 0.5, 0.5, 0.5, 0.01, 0.01]
    for advantage in (1.0, -1.0):
        tokens = of_probabilities(new, old, advantages=torch.full((6,), advantage))
        terms = rivals.ipo(tokens, settings(), rivals.IPOSettings(threshold=0.3, kl_weight=0.0))
        assert kept(terms) == "001110"


def test_ipo_penalises_squared_log_ratios_of_all_tokens():
    tokens = scored_tokens(*pair())
    terms: Any = rivals.ipo(tokens, settings(), rivals.IPOSettings(threshold=0.01, kl_weight=0.5))
    assert not terms.keep.all()
    log_ratio = (tokens.new_log_probs - tokens.old_log_probs).detach()
    torch.testing.assert_close(terms.penalty, 0.5 * log_ratio.square(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(terms.penalty.sum(), tokens.new_log_probs)
    torch.testing.assert_close(gradient, log_ratio, rtol=1e-12, atol=0)


ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0, -0.7, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("threshold", [12.5, 0.02])
def test_drpo_is_a_quadratic_penalty_of_the_change(threshold):
    """−A r + |A| p (r − 1)² / 2ε, of which the gradient in log p̃ is −A r (1 − sign(A) (p̃ − p)/ε)."""
    new, old, sampled = pair(distance=2.0)
    tokens = scored_tokens(new, old, sampled, advantages=ADVANTAGES)
    terms: Any = rivals.drpo(tokens, settings(), rivals.DRPOSettings(threshold=threshold))
    p, ratio = tokens.old_log_probs.exp(), (tokens.new_log_probs - tokens.old_log_probs).exp()
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
    penalty: Any = rivals.drpo(tokens, settings(), rivals.DRPOSettings(threshold=12.5)).penalty
    (gradient,) = torch.autograd.grad(penalty.sum(), new)
    assert penalty.isfinite().all() and float(penalty.detach()) > 1e17
    assert gradient.isfinite().all() and gradient.any()


RATIOS = torch.tensor([0.05, 0.5, 0.9, 1.1, 1.9, 2.1, 6.0] * 2, dtype=torch.float64)
SIGNS = torch.tensor([0.5] * 7 + [-0.5] * 7, dtype=torch.float64)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("cap", [math.inf, 2.0, 5.0])
def test_bounded_kl_penalty_limits_the_ratio_by_a_clip_and_a_cap(clip, cap):
    """−min(A r, A clip(r)), of a ratio that is min(r, cap) for either sign; without gradient where one holds it."""
    p = torch.full_like(RATIOS, 0.1)
    old, new = (torch.stack([x, 1 - x], -1).log() for x in (p, p * RATIOS))
    tokens = scored_tokens(new.requires_grad_(), old, torch.zeros(14, dtype=torch.long), advantages=SIGNS)
    terms: Any = rivals.bounded_kl_penalty(tokens, settings(), rivals.BoundedKLPenaltySettings(clip=clip, cap=cap))
    plain: Any = kl_penalty(tokens, settings(), KLPenaltySettings())
    assert torch.equal(terms.penalty, plain.penalty) and terms.keep is None
    capped = RATIOS.clamp(max=cap)
    loss = -SIGNS * capped
    if clip is not None:
        loss = -torch.minimum(SIGNS * capped, SIGNS * capped.clamp(1 - clip, 1 + clip))
    actual = -SIGNS * terms.log_ratio.exp()
    torch.testing.assert_close(actual, loss, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(actual.sum(), tokens.new_log_probs)
    free = torch.isclose(loss, -SIGNS * RATIOS, rtol=1e-9)
    assert free.any() and bool(free.all()) == (clip is None and cap == math.inf)
    torch.testing.assert_close(gradient, torch.where(free, -SIGNS * RATIOS, 0.0), rtol=1e-12, atol=1e-14)


# Settings


@pytest.mark.parametrize(
    ("surrogate", "name", "takes", "value"),
    [
        ("drpo", "threshold", "finite and above 0", 0.0),
        ("ipo", "threshold", "in (0, 1]", 1.1),
        ("ipo", "kl_weight", "finite and at least 0", -1.0),
        ("gmpo", "range", "finite and above 0", math.nan),
        ("dppo_kl", "threshold", "finite and above 0", -1.0),
        ("dppo_tv", "threshold", "in (0, 1]", 1.1),
        ("bounded_kl_penalty", "weight", "finite and above 0", 0.0),
        ("bounded_kl_penalty", "clip", "finite and above 0", 0.0),
        ("bounded_kl_penalty", "cap", "above 1", 1.0),
    ],
)
def test_config_refuses_a_value_that_a_rival_does_not_take(tmp_path, surrogate, name, takes, value):
    message = re.escape(f"{name} of surrogate {surrogate!r} must be {takes}, got {value!r}")
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, surrogate=surrogate, surrogate_kwargs={name: value})


@pytest.mark.parametrize("surrogate", RIVALS)
def test_defaults_are_those_of_the_page(tmp_path, surrogate):
    """And a `GRPOTrainer`, which would clip, fails without a range."""
    args = tiny.config(tmp_path, surrogate=surrogate)
    contract.assert_defaults_are_those_of_the_page(args)
    assert args.epsilon is None and args.epsilon_high is None


@pytest.mark.parametrize("surrogate", RIVALS)
def test_config_refuses_a_loss_that_a_rival_does_not_take(tmp_path, surrogate):
    contract.assert_refuses_losses(lambda **given: tiny.config(tmp_path, **given), surrogate)


@pytest.mark.parametrize(
    ("surrogate", "name", "given", "value"),
    [
        ("gmpo", "loss_type", "bnpo", "grpo"),
        ("bounded_kl_penalty", "importance_sampling_level", "sequence", "token"),
    ],
)
def test_a_rival_sets_the_loss_it_needs(tmp_path, surrogate, name, given, value):
    with pytest.warns(UserWarning, match=f"^{name}='{given}' is now '{value}': surrogate '{surrogate}' sets it"):
        assert getattr(tiny.config(tmp_path, surrogate=surrogate, **{name: given}), name) == value
    assert tiny.config(tmp_path, surrogate="gmpo").importance_sampling_level == "sequence"


# In a trainer


@pytest.fixture
def make(tmp_path: Path) -> tiny.Maker:
    tiny.make_model("llama").save_pretrained(tmp_path / "llama")
    return tiny.Maker(lambda name: tmp_path / name, tmp_path / "run")


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gmpo_is_gmpo_trainers(make, beta):
    # TRL weights the KL to the reference with the ratio, and its GMPOTrainer does not.
    ours = make(surrogate="gmpo", surrogate_kwargs={"range": 0.1}, beta=beta, use_bias_correction_kl=False)
    theirs = make(GMPOTrainer, epsilon=0.1, beta=beta)
    for inputs in tiny.same_updates(ours, theirs):
        assert OLD_POLICY not in inputs
        assert theirs._metrics["train"]["clip_ratio/region_mean"][0] > 0


def test_dppo_reads_policies_only_for_the_top_k(make):
    assert OLD_POLICY not in tiny.rollout(make(surrogate="dppo_tv"))[0]
    assert OLD_POLICY in tiny.rollout(make(surrogate="dppo_tv", surrogate_kwargs={"outcomes": "top_k"}))[0]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("own", [{"weight": 3.0, "cap": 1.02}, {"clip": 0.02, "cap": math.inf}], ids=str)
def test_bounded_kl_penalty_is_that_of_full_logits(make, own, loss_type):
    def of_token(new: Tensor, old: Tensor, sampled: int, advantage: float, args: Any) -> Tensor:
        ratio = (new[sampled] - old[sampled]).exp()
        log_new, log_old, _, _ = dense.outcomes(new, old, sampled, args)
        kl = (log_old.exp() * (log_old - log_new)).sum()
        limited = ratio.clamp(max=own["cap"])
        gain = limited * advantage
        if "clip" in own:
            gain = torch.minimum(gain, limited.clamp(1 - own["clip"], 1 + own["clip"]) * advantage)
        return own.get("weight", 1.0) * kl - gain

    def of_sequence(new: Tensor, old: Tensor, ids: list[int], advantage: float, args: Any) -> list[Tensor]:
        return [of_token(*token, advantage, args) for token in zip(new, old, ids, strict=True)]

    given = {"surrogate": "bounded_kl_penalty", "surrogate_kwargs": own}
    contract.assert_is_formula(make, of_sequence, support_top_k=5, loss_type=loss_type, **given)


@pytest.mark.parametrize("surrogate", RIVALS)
def test_terms_of_no_token_are_empty(surrogate):
    contract.assert_terms_of_no_token_are_empty(surrogate)


#: Of each kind one: masks, penalties, another ratio. What the other masks keep is said above.
KINDS = ("dppo_tv", "ipo", "drpo", "gmpo", "bounded_kl_penalty")


@pytest.mark.parametrize("surrogate", KINDS)
def test_on_policy_updates_are_the_identity(make, surrogate):
    own = {"outcomes": "top_k"} if surrogate.startswith("dppo") else {}
    contract.assert_on_policy_is_the_identity(make, surrogate, **own)
