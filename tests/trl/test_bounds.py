"""What bounds an update in the trainer: shared multipliers, schedules, controllers and per-token bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import troll
from tests.tolerance import within
from tests.trl import dense
from tests.trl.tiny import assert_same_gradients, logged, loss_and_gradients, move, no_warnings_about, rollout
from troll.trl import monitor
from troll.trl.checkpoints import MARKER
from troll.trust_region.bounds import BoundStatistics
from troll.trust_region.projecting.constraint import Constraint


def in_float64(trainer: Any, make: Any, inputs: dict[str, Any], **step: Any) -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss from full logits by the core's functions: value, gradients, and KL after the projection."""
    old_logits, mask, ids = inputs["old_logits"], dense.scored_mask(inputs), inputs["completion_ids"]
    model = make.model()
    model.load_state_dict(trainer.model.state_dict())
    new_logits = dense.completion_logits(model, inputs, 1.0)
    made = troll.trust_region_step(new_logits, troll.capture(old_logits, ids), **step)
    loss, _ = troll.troll_loss(made, inputs["advantages"].double(), mask)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, made.kl_after


def moved(make: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer after an update that went far, and a micro-batch with the logits from before it."""
    trainer = make(loss_type="grpo", kl_bound=0.01, **settings)
    inputs = dict(rollout(trainer)[0])
    with torch.no_grad():
        inputs["old_logits"] = dense.completion_logits(trainer.model, inputs, 1.0)
    move(trainer.model, 0.1)
    return trainer, inputs


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_tokens_share_a_multiplier(make, scope, reduction):
    trainer, inputs = moved(make, constraint=scope, constraint_reduction=reduction)
    mask = dense.scored_mask(inputs)
    constraint = getattr(Constraint, scope)(mask, reduction)
    expected, expected_gradients, kl = in_float64(trainer, make, inputs, kl_bound=0.01, constraint=constraint)
    loss, gradients = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(gradients, expected_gradients, 1e-4)
    kl = torch.where(mask, kl, 0.0)
    sums = kl.sum(-1) if scope == "sequence" else kl.sum().view(1)
    counts = mask.sum(-1) if scope == "sequence" else mask.sum().view(1)
    shared = sums / counts if reduction == "mean" else sums
    assert float(shared.max()) == pytest.approx(0.01, rel=1e-6)
    assert reduction == "sum" or float(kl.max()) > 0.01


def test_tool_tokens_have_no_say_in_a_shared_bound(make):
    trainer, inputs = moved(make, constraint="sequence")
    mask = inputs["completion_mask"].clone()
    mask[:, 1] = 0
    inputs["tool_mask"] = mask
    constraint = Constraint.sequence(dense.scored_mask(inputs) & mask.bool())
    model = make.model()
    model.load_state_dict(trainer.model.state_dict())
    ids = inputs["completion_ids"]
    old = troll.capture(inputs["old_logits"], ids)
    step = troll.trust_region_step(
        dense.completion_logits(model, inputs, 1.0), old, kl_bound=0.01, constraint=constraint
    )
    counted = dense.scored_mask(inputs) & mask.bool()
    expected, _ = troll.troll_loss(step, inputs["advantages"].double(), counted)
    assert loss_and_gradients(trainer, inputs)[0] == pytest.approx(expected.item(), rel=1e-4)


def test_tokens_with_a_negative_advantage_have_a_bound_of_their_own(make):
    trainer, inputs = moved(make, kl_bound_negative_ratio=0.1)
    advantages = inputs["advantages"].unsqueeze(-1).expand(inputs["completion_ids"].shape)
    bounds = torch.where(advantages < 0, 0.001, 0.01).double()
    assert 0 < float((advantages < 0).double().mean()) < 1
    expected, expected_gradients, _ = in_float64(trainer, make, inputs, kl_bound=bounds)
    loss, gradients = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(gradients, expected_gradients, 1e-4)


def test_bounds_follow_the_old_policys_entropy(make):
    trainer, inputs = moved(make, kl_bound_entropy_exponent=1.0)
    entropies = torch.cat(
        [
            torch.special.entr(batch_logits.log_softmax(-1).exp()).sum(-1)[dense.scored_mask(batch)]
            for batch, batch_logits in zip(trainer._buffered_inputs, old_logits(make, trainer), strict=True)
        ]
    )
    own = torch.special.entr(inputs["old_logits"].log_softmax(-1).exp()).sum(-1)
    bounds = 0.01 * (own / entropies.mean()).clamp(0.1, 10)
    expected, expected_gradients, _ = in_float64(trainer, make, inputs, kl_bound=bounds)
    loss, gradients = loss_and_gradients(trainer, inputs)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert_same_gradients(gradients, expected_gradients, 2e-4)


def old_logits(make: Any, trainer: Any) -> list[Tensor]:
    with torch.no_grad():
        return [dense.completion_logits(make.model(), batch, 1.0) for batch in trainer._buffered_inputs]


def test_a_schedule_is_logged_and_ends_where_it_should(make):
    trainer = make(kl_bound=0.1, kl_bound_schedule="linear", kl_bound_schedule_kwargs={"end": 0.02}, max_steps=4)
    trainer.train()
    bounds = logged(trainer, "trust_region/kl_bound")
    assert bounds == pytest.approx([0.1, 0.08, 0.06, 0.04])
    assert trainer.kl_bound.value == pytest.approx(0.02)
    largest = logged(trainer, "trust_region/kl_after_max")
    assert all(kl <= bound * (1 + within(1e-3)) for kl, bound in zip(largest, bounds, strict=True))
    assert largest[3] == pytest.approx(0.04, rel=1e-3)


def test_a_controller_holds_the_projected_fraction(make):
    trainer = make(
        kl_bound=0.005,
        kl_bound_schedule="hold_projected_fraction",
        kl_bound_schedule_kwargs={"target": 0.1, "rate": 0.3, "smoothing": 0.5},
        max_steps=48,
    )
    trainer.train()
    bounds, fractions = (logged(trainer, f"trust_region/{name}") for name in ("kl_bound", "projected_fraction"))
    assert max(bounds) > 0.006
    # The measurements that the controller saw are those that are logged.
    replayed = trainer.args.make_bound(total_steps=48)
    kls = logged(trainer, "trust_region/kl_before_mean")
    for step, (fraction, kl, bound) in enumerate(zip(fractions, kls, bounds, strict=True), start=1):
        assert replayed.value == pytest.approx(bound, rel=1e-4)
        replayed.update(step, BoundStatistics(fraction, kl))


def test_epsilon_rests_while_the_critic_warms_up(make):
    """The policy does not move then: nothing is projected, which says nothing about ε."""
    trainer = make(
        advantage_estimator="gae",
        critic_warmup_steps=3,
        kl_bound_schedule="hold_projected_fraction",
        kl_bound_schedule_kwargs={"target": 0.1, "rate": 0.5},
        max_steps=6,
    )
    trainer.train()
    bounds = logged(trainer, "trust_region/kl_bound")
    assert bounds[:4] == [0.05] * 4
    assert bounds[5] != 0.05


def test_a_rival_has_no_bound(make):
    trainer = make(surrogate="clip", diagnostics_steps=2, max_steps=4)
    trainer.train()
    assert logged(trainer, "trust_region/kl_before_mean")
    assert not logged(trainer, "trust_region/kl_bound")


@pytest.mark.parametrize(
    "settings",
    [
        {"constraint": "batch", "kl_bound": 1e-6},
        {
            "kl_bound": 0.01,
            "kl_bound_schedule": "hold_projected_fraction",
            "kl_bound_schedule_kwargs": {"target": 0.5},
        },
    ],
)
def test_many_projected_tokens_are_what_was_asked_for(make, monkeypatch, settings):
    monkeypatch.setattr(monitor, "WATCHED_STEPS", 2)
    with no_warnings_about("of the tokens were projected"):
        make(max_steps=6, **settings).train()


def test_a_checkpoint_without_the_state_of_a_schedule_is_warned_about(make, tmp_path):
    settings = {"kl_bound_schedule": "linear", "kl_bound_schedule_kwargs": {"end": 0.01}, "max_steps": 4}
    make(save_strategy="steps", save_steps=2, output_dir=str(tmp_path), **settings).train()
    for name in ("kl_bound.json", MARKER):  # as an older version left it
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.warns(UserWarning, match="the schedule of kl_bound starts anew"):
        make(output_dir=str(tmp_path), **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_bound_schedule": "linear"}, "needs end"),
        ({"kl_bound_schedule": "linear", "kl_bound_schedule_kwargs": {"end": -1.0}}, "end must be above 0"),
        ({"kl_bound_schedule": "hold_kl", "kl_bound_schedule_kwargs": {"targt": 0.1}}, "targt"),
        ({"kl_bound_schedule": "square"}, "must be one of fixed, linear"),
        ({"kl_bound_schedule_kwargs": "end"}, "kl_bound_schedule_kwargs must be a JSON object"),
        ({"constraint": "tokens"}, "constraint must be one of token, sequence, batch"),
        ({"constraint_reduction": "max"}, "constraint_reduction must be one of mean, sum"),
        ({"kl_bound_negative_ratio": 0.0}, "kl_bound_negative_ratio must be finite and above 0"),
        ({"kl_bound_negative_ratio": float("inf")}, "kl_bound_negative_ratio must be finite and above 0"),
        ({"critic_learning_rate": float("inf")}, "critic_learning_rate must be finite and above 0"),
        ({"dppo_threshold": -1.0}, "dppo_threshold must be finite and above 0"),
        ({"support_top_k": 8.5}, "support_top_k must be an integer, at least 1, got 8.5"),
        ({"diagnostics_steps": 2.5}, "diagnostics_steps must be an integer, at least 0"),
    ],
)
def test_wrong_options_are_found_before_training(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
