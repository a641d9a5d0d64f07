"""The surrogates in a trainer: TRL's own losses, and what a trainer makes of the terms of the others.

Each by itself is tested in `surrogates/`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from tests.troll.trl import dense
from tests.troll.trl.surrogates.contract import (
    assert_is_formula,
    assert_measured_when_diagnostics_are_due,
    assert_on_policy_is_the_identity,
    assert_same_rollouts,
)
from tests.troll.trl.test_loss import EVERY_LOSS
from tests.troll.trl.tiny import loss_and_gradients, rollout, same_updates
from troll.trl import TrollTrainer, register_surrogate
from troll.trl.old_policy import OLD_POLICY
from troll.trl.surrogates import (
    SURROGATES,
    NoSettings,
    ScoredTokens,
    Surrogate,
    Terms,
    common_outcomes,
    divergence,
    number,
)

CLIPS: dict[str, dict[str, Any]] = {
    "clip": {"epsilon": 0.1},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.28},
    "dual clip": {"epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.4},
}


@pytest.mark.parametrize(
    ("clip", "loss_type", "level", "diagnostics_steps"),
    [
        ("clip", "grpo", "token", 1),
        ("clip-higher", "bnpo", "sequence", 1),
        ("dual clip", "dr_grpo", "token", 1),
        ("clip", "dapo", "sequence", 1),
        ("dual clip", "dapo", "token", 0),  # without diagnostics the loss is handed on as it is
    ],
)
def test_clip_is_grpo_trainers(make, clip, loss_type, level, diagnostics_steps):
    settings = {"loss_type": loss_type, "importance_sampling_level": level, **CLIPS[clip]}
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


@pytest.mark.parametrize(("settings", "diagnostics_steps"), [(TRLS_OWN[0], 0), *((each, 1) for each in TRLS_OWN)])
def test_trls_own_surrogates_are_trls(make, settings, diagnostics_steps):
    given = {**settings, "loss_type": "grpo", "surrogate": settings["loss_type"]}  # a recipe's, for the clip
    if settings["loss_type"] == "luspo":
        given = {**settings, "surrogate": "clip"}
    ours, theirs = make(diagnostics_steps=diagnostics_steps, **given), make(GRPOTrainer, **settings)
    clipped = 0.0
    for _ in same_updates(ours, theirs):
        found, expected = (trainer._metrics["train"].get("cispo_clip_ratio", []) for trainer in (ours, theirs))
        assert found == pytest.approx(expected)
        clipped += sum(found)
    assert (clipped > 0) == (settings["loss_type"] == "cispo")


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is gone after it."""
    with mock.patch.dict(SURROGATES):
        yield


@dataclass(frozen=True)
class ShareSettings:
    share: float = number(0.25, "in [0, 1]")


@pytest.mark.parametrize(("loss_type", "level"), EVERY_LOSS)
def test_a_new_surrogate_is_one_function_and_one_registration(make, registry, loss_type, level):
    """The loss is what its three terms say."""

    def shared(tokens: ScoredTokens, args: Any, own: ShareSettings) -> Terms:
        log_ratio = own.share * tokens.log_ratio
        return Terms(log_ratio=log_ratio, keep=tokens.log_ratio.detach() < 0, penalty=log_ratio.square())

    def of_sequence(new: Tensor, old: Tensor, ids: list[int], advantage: float, args: Any) -> list[Tensor]:
        log_ratio = 0.5 * (new - old)[range(len(ids)), ids]
        keep = log_ratio.detach() < 0
        kept.extend(keep.tolist())
        used = log_ratio.mean() if level == "sequence" else log_ratio
        return list(-used.exp() * advantage * keep + log_ratio.square())

    kept: list[bool] = []
    register_surrogate("shared", Surrogate(shared, ShareSettings))
    settings = {"surrogate": "shared", "surrogate_kwargs": {"share": 0.5}, "importance_sampling_level": level}
    assert_is_formula(make, of_sequence, loss_type=loss_type, **settings)
    assert 0 < sum(kept) < len(kept)


@pytest.mark.parametrize("reads_policies", [False, True])
def test_surrogates_know_sequences_and_which_tokens_count(make, registry, reads_policies):
    """And whole distributions, if they read them."""
    seen: list[ScoredTokens] = []

    def noted(tokens: ScoredTokens, args: Any, own: NoSettings) -> Terms:
        seen.append(tokens)
        return Terms()

    register_surrogate("noted", Surrogate(noted, reads_policies=reads_policies))
    trainer = make(surrogate="noted")
    inputs = dense.with_tools(rollout(trainer)[0])
    loss_and_gradients(trainer, inputs)
    (tokens,), scored = seen, inputs["completion_mask"].bool()
    assert (tokens.old is not None) == (tokens.new is not None) == reads_policies
    if tokens.old is not None and tokens.new is not None:
        outcomes = common_outcomes(tokens.new, tokens.old)
        kl = divergence(outcomes.old - outcomes.new, outcomes.new)
        assert len(kl) == len(tokens.advantages) and kl.requires_grad
    rows = torch.arange(len(scored)).unsqueeze(-1).expand(scored.shape)
    assert tokens.sequence.tolist() == rows[scored].tolist()
    assert tokens.counts.tolist() == inputs["tool_mask"][scored].bool().tolist()
    assert not tokens.counts.all() and len(tokens.sequence.unique()) > 1
    masks = dense.scored_mask(inputs)
    for at, row, mask in zip(tokens.by_sequence(), inputs["old_per_token_logps"], masks, strict=True):
        assert tokens.old_log_probs[at].tolist() == row[mask].tolist()


@pytest.mark.parametrize(("surrogate", "projects"), [("kl_penalty", False), ("regression", True)])
def test_what_reads_policies_is_measured(make, surrogate, projects):
    trainer = make(surrogate=surrogate, kl_bound=1e-4, constraint="sequence", logging_steps=2, max_steps=2)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "trust_region/kl_before_mean" in entry]
    assert entry["trust_region/kl_before_mean"] > 0
    assert (entry["trust_region/projected_fraction"] > 0) == projects
    assert entry.get("trust_region/kl_bound") == (1e-4 if projects else None)


@pytest.mark.parametrize("surrogate", ["troll", "kl_penalty", "cispo"])
def test_on_policy_updates_are_the_identity(make, surrogate):
    assert_on_policy_is_the_identity(make, surrogate)


def test_all_surrogates_start_from_the_same_rollout(make):
    assert_same_rollouts(make, "troll", "clip")


def test_a_surrogate_without_projection_is_measured_when_due(make):
    assert_measured_when_diagnostics_are_due(make, "clip")


def test_a_penalty_on_a_loss_that_cannot_have_one_is_refused(make):
    def with_penalty(tokens: ScoredTokens, args: Any, own: Any) -> Terms:
        return Terms(penalty=tokens.new_log_probs)

    with mock.patch.dict(SURROGATES, mine=Surrogate(with_penalty, sets={"loss_type": "sapo"})):
        trainer = make(surrogate="mine")
        with pytest.raises(ValueError, match="surrogate 'mine' sets loss_type 'sapo', to which no penalty"):
            trainer.train()
