"""The surrogates in a trainer: TRL's own losses, and the others in float64 from full logits.

Each by itself, on closed forms, is tested in `surrogates/`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.trl import dense
from tests.trl.surrogates.scored import scored_tokens
from tests.trl.tiny import assert_same_gradients, loss_and_gradients, move, rollout, same_updates
from tests.trl.tiny import gradients as gradients_of
from troll.trl import TrollTrainer
from troll.trl.old_policy import OLD_POLICY
from troll.trl.own_settings import number
from troll.trl.surrogates import SURROGATES, NoSettings, ScoredTokens, Surrogate, Terms
from troll.trl.surrogates.formulas import troll as troll_terms
from troll.trl.surrogates.masks import dppo_kl, dppo_tv

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
LEVELS = ("token", "sequence")


@pytest.mark.parametrize("diagnostics_steps", [0, 1])
@pytest.mark.parametrize(("loss_type", "level"), list(itertools.product(LOSS_TYPES, LEVELS)))
@pytest.mark.parametrize(
    "clip",
    [{"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.4}],
    ids=["clip", "clip-higher", "dual clip"],
)
def test_clip_is_grpo_trainers(make, clip, loss_type, level, diagnostics_steps):
    settings = {"loss_type": loss_type, "importance_sampling_level": level, **clip}
    ours = make(TrollTrainer, surrogate="clip", diagnostics_steps=diagnostics_steps, **settings)
    theirs = make(GRPOTrainer, **settings)
    for inputs in same_updates(ours, theirs):
        assert (OLD_POLICY in inputs) == bool(diagnostics_steps)
        clipped = theirs._metrics["train"]["clip_ratio/region_mean"]
        assert ours._metrics["train"]["clip_ratio/region_mean"] == pytest.approx(clipped)
    assert clipped[0] > 0


def test_none_is_an_infinite_clip(make):
    ours = make(TrollTrainer, surrogate="none")
    for inputs in same_updates(ours, make.stock()):
        assert OLD_POLICY not in inputs
        assert not [name for name in ours._metrics["train"] if name.startswith("clip_ratio/")]


TRLS_OWN: list[dict[str, Any]] = [
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.5},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
]


@pytest.mark.parametrize("diagnostics_steps", [0, 1])
@pytest.mark.parametrize("settings", TRLS_OWN, ids=lambda settings: settings["loss_type"])
def test_trls_own_surrogates_are_trls(make, settings, diagnostics_steps):
    given = {**settings, "loss_type": "grpo", "surrogate": settings["loss_type"]}  # a recipe's, for the clip
    if settings["loss_type"] == "luspo":
        given = {**settings, "surrogate": "clip"}
    ours, theirs = make(diagnostics_steps=diagnostics_steps, **given), make(GRPOTrainer, **settings)
    clipped = 0.0
    for inputs in same_updates(ours, theirs):
        assert (OLD_POLICY in inputs) == bool(diagnostics_steps)
        found, expected = (trainer._metrics["train"].get("cispo_clip_ratio", []) for trainer in (ours, theirs))
        assert found == pytest.approx(expected)
        clipped += sum(found)
    assert (clipped > 0) == (settings["loss_type"] == "cispo")


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gmpo_is_gmpo_trainers(make, beta):
    # TRL weights the KL to the reference with the ratio, and its GMPOTrainer does not.
    ours = make(surrogate="gmpo", surrogate_kwargs={"range": 0.1}, beta=beta, use_bias_correction_kl=False)
    theirs = make(GMPOTrainer, epsilon=0.1, beta=beta)
    for inputs in same_updates(ours, theirs):
        assert OLD_POLICY not in inputs
        assert theirs._metrics["train"]["clip_ratio/region_mean"][0] > 0


def test_the_default_range_of_gmpo_is_trls(make):
    assert make(surrogate="gmpo").args.own_settings.range == GMPOConfig.__dataclass_fields__["epsilon"].default


def dense_loss(kind: str, new: Tensor, old: Tensor, sampled: int, advantage: float, args: Any) -> Tensor:
    """A token's loss, of two (V,) log-probabilities in float64."""
    log_ratio = new[sampled] - old[sampled]
    policy, moved = -log_ratio.exp() * advantage, new[sampled].exp() - old[sampled].exp()
    if kind == "regression":
        return policy + args.regression_weight * dense.token(new, old, sampled, args).regression
    if kind == "kl_penalty":
        log_new, log_old, _, _ = dense.outcomes(new, old, sampled, args)
        of, to = (log_old, log_new) if args.own_settings.direction == "old_new" else (log_new, log_old)
        if args.own_settings.cap is not None:
            policy = -log_ratio.exp().clamp(max=args.own_settings.cap) * advantage
        return policy + args.own_settings.weight * (of.exp() * (of - to)).sum()
    if kind == "drpo":
        return policy + abs(advantage) * moved.square() / old[sampled].exp() / (2 * args.own_settings.threshold)
    assert kind == "ipo"
    kept = float(moved.abs().detach() <= args.own_settings.threshold)
    return kept * policy + args.own_settings.kl_weight * log_ratio.square()


RIVALS: list[dict[str, Any]] = [
    {"surrogate": "regression", "kl_bound": 0.01, "regression_weight": 2.0},
    {"surrogate": "regression", "kl_bound": 0.01, "regression_weight": 2.0, "pull": "proximal"},
    {"surrogate": "kl_penalty", "surrogate_kwargs": {"weight": 3.0}},
    {"surrogate": "kl_penalty", "surrogate_kwargs": {"weight": 3.0, "cap": 1.02}},
    {"surrogate": "kl_penalty", "surrogate_kwargs": {"weight": 3.0, "direction": "new_old"}},
    {"surrogate": "kl_penalty", "tail": "floor"},
    {"surrogate": "drpo", "surrogate_kwargs": {"threshold": 0.1}},
    {"surrogate": "ipo", "surrogate_kwargs": {"threshold": 0.02, "kl_weight": 0.5}},
]


def assert_is_formula(make: Any, trainer: Any, of_sequence: Callable[..., list[Tensor]]) -> None:
    """The loss and its gradients, after the network has moved, are those of a formula on full logits.

    `of_sequence` takes the new and the old log-probabilities (t, V) of a completion's tokens, their ids and the
    advantage, and returns the loss of each.
    """
    inputs = rollout(trainer)[0]
    with torch.no_grad():
        old = dense.completion_logits(make.model(), inputs, 1.0).log_softmax(-1)
    move(trainer.model, 0.1)
    loss, gradients = loss_and_gradients(trainer, inputs)

    model = make.copied(trainer)
    new, mask = dense.completion_logits(model, inputs, 1.0).log_softmax(-1), dense.scored_mask(inputs)
    sequences = zip(new, old, inputs["completion_ids"], inputs["advantages"].tolist(), mask, strict=True)
    rows = [of_sequence(n[at], o[at], ids[at].tolist(), advantage) for n, o, ids, advantage, at in sequences]
    expected = dense.aggregate(rows, inputs, trainer.args)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert_same_gradients(gradients, gradients_of(model))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("settings", RIVALS, ids=str)
def test_a_rival_is_its_formula_on_full_logits(make, settings, loss_type):
    trainer = make(support_top_k=5, loss_type=loss_type, **settings)

    def of_sequence(new: Tensor, old: Tensor, ids: list[int], advantage: float) -> list[Tensor]:
        return [
            dense_loss(settings["surrogate"], *token, advantage, trainer.args)
            for token in zip(new, old, ids, strict=True)
        ]

    assert_is_formula(make, trainer, of_sequence)


def trls_own(kind: str, new: Tensor, old: Tensor, advantage: float, args: Any) -> Tensor:
    """The losses of a sequence's tokens, (t,), from the log-probabilities of those that were sampled."""
    ratio = (new - old).exp()
    if kind == "sapo":
        temperature = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
        return -advantage * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    if kind == "cispo":
        return -advantage * ratio.detach().clamp(max=args.epsilon_high) * new
    assert kind == "vespo"
    positive = (args.vespo_k_pos, args.vespo_lambda_pos)
    k, rate = positive if advantage > 0 else (args.vespo_k_neg, args.vespo_lambda_neg)
    weight = ratio.detach().prod()
    return -advantage * weight**k * torch.exp(rate * (1 - weight)) * new


@pytest.mark.parametrize(
    "settings",
    [
        {"surrogate": "cispo", "epsilon_high": 1.02},
        {"surrogate": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {
            "surrogate": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 2.5,
            "vespo_k_neg": 2.0,
            "vespo_lambda_neg": 0.5,
        },
    ],
    ids=lambda settings: settings["surrogate"],
)
def test_trls_own_surrogates_are_their_formulas_on_full_logits(make, settings):
    trainer = make(**settings)
    signs: set[tuple[bool, bool]] = set()

    def of_sequence(new: Tensor, old: Tensor, ids: list[int], advantage: float) -> list[Tensor]:
        new, old = (log_probs[range(len(ids)), ids] for log_probs in (new, old))
        signs.update((advantage > 0, above) for above in (new - old > math.log(1.02)).tolist())
        return list(trls_own(settings["surrogate"], new, old, advantage, trainer.args))

    assert_is_formula(make, trainer, of_sequence)
    for seen in zip(*signs, strict=True):
        assert set(seen) == {True, False}, "both signs of the advantage, and both sides of cispo's cap"


@pytest.mark.parametrize("surrogate", ["kl_penalty", "regression"])
def test_what_reads_policies_is_measured(make, surrogate):
    trainer = make(surrogate=surrogate, kl_bound=1e-4, constraint="sequence", logging_steps=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "trust_region/kl_before_mean" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        assert entry["trust_region/kl_before_mean"] > 0
        projects = surrogate == "regression"
        assert (entry["trust_region/projected_fraction"] > 0) == projects
        assert entry.get("trust_region/kl_bound") == (1e-4 if projects else None)
        assert entry.get("trust_region/kl_penalty_weight") == (None if projects else 1.0)


def divergence(new: Tensor, old: Tensor, sampled: int, kind: str, args: Any) -> float:
    """Of two (V,) float64 distributions, on two outcomes or on the support and the rest."""
    ids = [sampled] if args.own_settings.outcomes == "binary" else dense.support(old, sampled, args.support_top_k, 1e-5)
    rest = [v for v in range(len(old)) if v not in ids]
    p_new, p_old = ([*p[ids].exp().tolist(), float(p[rest].exp().sum())] for p in (new, old))
    if kind == "dppo_tv":
        return 0.5 * sum(abs(a - b) for a, b in zip(p_new, p_old, strict=True))
    return sum(b * float(torch.tensor(b / a).log()) for a, b in zip(p_new, p_old, strict=True) if b > 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("outcomes", ["binary", "top_k"])
@pytest.mark.parametrize(("kind", "threshold"), [("dppo_tv", 0.02), ("dppo_kl", 0.002)])
def test_dppo_masks_what_is_far_and_leaving(make, kind, threshold, outcomes, loss_type, level):
    trainer = make(
        surrogate=kind,
        surrogate_kwargs={"threshold": threshold, "outcomes": outcomes},
        support_top_k=5,
        loss_type=loss_type,
        importance_sampling_level=level,
    )
    kept: list[bool] = []

    def of_sequence(new: Tensor, old: Tensor, ids: list[int], advantage: float) -> list[Tensor]:
        ratios = torch.stack([n[token] - o[token] for n, o, token in zip(new, old, ids, strict=True)])
        used = ratios.mean().expand_as(ratios) if level == "sequence" else ratios
        keep = [
            divergence(n.detach(), o, token, kind, trainer.args) <= threshold or float(ratio) * advantage <= 0
            for n, o, token, ratio in zip(new, old, ids, ratios, strict=True)
        ]
        kept.extend(keep)
        return [-ratio * advantage * k for ratio, k in zip(used.exp(), keep, strict=True)]

    assert_is_formula(make, trainer, of_sequence)
    assert 0 < sum(kept) < len(kept)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_dppo_on_the_outcomes_of_a_floored_tail(make, kind):
    """Both policies on the union of their supports; with the whole vocabulary it is what a bucket gives."""
    losses = []
    for tail in ("floor", "bucket"):
        settings = {"surrogate_kwargs": {"outcomes": "top_k", "threshold": 0.01}, "mass_threshold": 0.0}
        trainer = make(surrogate=kind, tail=tail, support_top_k=48, **settings)
        inputs = rollout(trainer)[0]
        move(trainer.model, 0.1)
        losses.append(loss_and_gradients(trainer, inputs)[0])
        make(surrogate=kind, tail=tail, support_top_k=5, **settings).train()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_trm_and_cppo_see_whole_sequences(make):
    """TRM with a threshold between their largest divergences; CPPO without weights and with no budget for a prefix."""

    def of_trm(new: Tensor, old: Tensor, ids: list[int], advantage: float) -> list[Tensor]:
        log_ratio = (new - old)[range(len(ids)), ids]
        kept.append(float(log_ratio.detach().square().max()) / 2 <= 0.7)
        return list(-advantage * log_ratio.exp() * kept[-1])

    def of_cppo(new: Tensor, old: Tensor, ids: list[int], advantage: float) -> list[Tensor]:
        new, old = (log_probs[range(len(ids)), ids] for log_probs in (new, old))
        moved = (new.exp() - old.exp()).detach()
        keep = (moved.abs().cumsum(0) <= 0.01) | (moved * advantage <= 0)
        kept.extend(keep.tolist())
        return list(-advantage * (new - old).exp() * keep)

    own: dict[str, dict[str, float]] = {
        "trm": {"threshold": 0.7},
        "cppo": {"threshold": 0.01, "last_weight": 1.0, "budget": 0.0},
    }
    for surrogate, of_sequence in (("trm", of_trm), ("cppo", of_cppo)):
        kept: list[bool] = []
        assert_is_formula(make, make(surrogate=surrogate, surrogate_kwargs=own[surrogate]), of_sequence)
        assert 0 < sum(kept) < len(kept), surrogate


def test_surrogates_know_the_sequence_of_a_token_and_whether_it_counts(make, monkeypatch):
    seen: list[ScoredTokens] = []

    def noted(tokens: ScoredTokens, args: Any, own: NoSettings) -> Terms:
        seen.append(tokens)
        return Terms()

    monkeypatch.setitem(SURROGATES, "noted", Surrogate(noted))
    trainer = make(surrogate="noted")
    inputs = dense.with_tools(rollout(trainer)[0])
    loss_and_gradients(trainer, inputs)
    (tokens,), scored = seen, inputs["completion_mask"].bool()
    rows = torch.arange(len(scored)).unsqueeze(-1).expand(scored.shape)
    assert tokens.sequence.tolist() == rows[scored].tolist()
    assert tokens.counts.tolist() == inputs["tool_mask"][scored].bool().tolist()
    assert not tokens.counts.all() and len(tokens.sequence.unique()) > 1
    for at, row, mask in zip(
        tokens.by_sequence(), inputs["old_per_token_logps"], dense.scored_mask(inputs), strict=True
    ):
        assert tokens.old_log_probs[at].tolist() == row[mask].tolist()


@pytest.mark.parametrize(("old_logit", "new_logit"), [(-32.0, -29.0), (-20.0, -40.0), (-40.0, -20.0)])
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_ratio_of_a_projected_token_below_the_floor(make, tail, old_logit, new_logit):
    """With a bucket, τ s − A(τ) where s is of the raw probabilities; with a floored tail, of the floored ones."""
    args = make(tail=tail, support_top_k=3, mass_threshold=0.0).args
    old_logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, old_logit]], dtype=torch.float64)
    logits = torch.tensor([[0.5, 1.0, 2.5, -1.0, new_logit]], dtype=torch.float64, requires_grad=True)
    tokens = scored_tokens(logits, old_logits, torch.tensor([4]), kl_bound=args.kl_bound, top_k=3, tail=tail)
    terms = troll_terms(tokens, args, NoSettings())
    assert terms.log_ratio is not None and terms.penalty is not None and terms.step is not None
    assert terms.step.projected.all()
    reference = logits.detach().clone().requires_grad_()
    expected = dense.token(reference[0], old_logits[0], 4, args)
    assert float(terms.log_ratio) == pytest.approx(float(expected.log_ratio), abs=1e-8)
    (terms.log_ratio.exp() + terms.penalty).sum().backward()
    (expected.log_ratio.exp() + expected.regression).backward()
    assert logits.grad is not None and reference.grad is not None
    torch.testing.assert_close(logits.grad, reference.grad, rtol=1e-6, atol=1e-9)


def test_dppo_reads_policies_only_for_the_top_k(make):
    assert OLD_POLICY not in rollout(make(surrogate="dppo_tv"))[0]
    assert OLD_POLICY in rollout(make(surrogate="dppo_tv", surrogate_kwargs={"outcomes": "top_k"}))[0]


def test_certain_tokens_have_finite_divergences(make):
    """Log-probabilities of 0 and slightly above it, as rounding makes them, and far below."""
    log_probs = torch.tensor([0.0, 1e-7, -1e-9, -80.0, 0.0])
    moved = torch.tensor([-5.0, 0.0, -3.0, 0.0, 0.0])
    tokens = ScoredTokens(
        new_log_probs=moved,
        old_log_probs=log_probs,
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0]),
        kl_bound=0.05,
        penalty_weight=1.0,
        constraint=None,
        old=None,
        new=None,
        sequence=torch.zeros(5, dtype=torch.long),
        counts=torch.ones(5, dtype=torch.bool),
    )
    # Far and leaving; equal; far, but coming back (A > 0 and r < 1); far and leaving; equal.
    for name, dppo in (("dppo_kl", dppo_kl), ("dppo_tv", dppo_tv)):
        args = make(surrogate=name).args
        keep = dppo(tokens, args, args.own_settings).keep
        assert keep is not None
        assert keep.tolist() == [False, True, True, False, True]


def test_thresholds_are_the_papers_unless_given(make):
    assert make(surrogate="dppo_tv").args.own_settings.threshold == 0.15
    assert make(surrogate="dppo_kl").args.own_settings.threshold == 0.05
    assert make(surrogate="dppo_kl", surrogate_kwargs={"threshold": 0.3}).args.own_settings.threshold == 0.3


def test_a_new_surrogate_is_one_function_and_one_registration(make, monkeypatch):
    """A share of the log ratio, and a penalty on it: the loss is what the two terms say."""

    @dataclass(frozen=True)
    class ShareSettings:
        share: float = number(0.25, "in [0, 1]")

    def shared(tokens: ScoredTokens, args: Any, own: ShareSettings) -> Terms:
        log_ratio = own.share * (tokens.new_log_probs - tokens.old_log_probs)
        return Terms(log_ratio=log_ratio, penalty=log_ratio.square())

    monkeypatch.setitem(SURROGATES, "shared", Surrogate(shared, ShareSettings))
    trainer = make(surrogate="shared", surrogate_kwargs={"share": 0.5}, loss_type="bnpo")
    inputs = rollout(trainer)[0]
    move(trainer.model, 0.1)
    loss, _ = loss_and_gradients(trainer, inputs)
    mask = dense.scored_mask(inputs)
    with torch.no_grad():
        new = dense.completion_log_probs(trainer.model, inputs)
    log_ratio = 0.5 * (new - inputs["old_per_token_logps"].double())
    per_token = -log_ratio.exp() * inputs["advantages"].unsqueeze(-1) + log_ratio.square()
    assert loss == pytest.approx(float(per_token[mask].mean()), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_on_policy_updates_with_the_log_probabilities_of_vllm(make, surrogate):
    """vLLM's importance correction has TRL score on-policy rollouts too, where every surrogate is the identity."""
    own = {"outcomes": "top_k"} if surrogate.startswith("dppo") else None
    trainer = make(surrogate=surrogate, steps_per_generation=1, surrogate_kwargs=own, diagnostics_steps=1)
    (inputs,) = rollout(trainer)
    with torch.no_grad():
        old = dense.completion_log_probs(trainer.model, inputs).float()
    loss, gradients = loss_and_gradients(trainer, inputs | {"old_per_token_logps": old})
    expected, expected_gradients = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert_same_gradients(gradients, expected_gradients, 2e-5)


def test_all_surrogates_start_from_the_same_rollout(make):
    rollouts = {name: rollout(make(surrogate=name)) for name in SURROGATES}
    for name, buffered in rollouts.items():
        for ours, reference in zip(buffered, rollouts["troll"], strict=True):
            assert ours["completion_ids"].tolist() == reference["completion_ids"].tolist(), name
            assert ours["advantages"].tolist() == reference["advantages"].tolist(), name


def test_settings_of_a_surrogate_are_settings(make):
    known = {field.name for field in dataclasses.fields(make().args)}
    for name, surrogate in SURROGATES.items():
        assert set(surrogate.fields) <= known, name


@pytest.mark.parametrize("surrogate", ["clip", "none", "dppo_tv", "drpo", "gmpo", "cispo"])
def test_a_rival_is_measured_when_diagnostics_are_due(make, surrogate):
    trainer = make(surrogate=surrogate, diagnostics_steps=4, max_steps=8, logging_steps=4)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "trust_region/kl_before_mean" in entry]
    assert [entry["step"] for entry in logs] == [4, 8]
    for entry in logs:
        assert entry["trust_region/kl_before_mean"] == entry["trust_region/kl_after_mean"] > 0
        assert entry["trust_region/projected_fraction"] == 0
