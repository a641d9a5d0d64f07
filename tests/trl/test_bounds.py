"""What bounds an update in the trainer: shared multipliers, schedules, controllers and per-token bounds."""

from typing import Any

import pytest
import torch
from torch import Tensor

import troll
from tests.tolerance import within
from tests.trl import dense
from tests.trl.tiny import logged
from troll.trust_region.bounds import BoundStatistics
from troll.trust_region.constraint import Constraint


def moved(make: Any, **settings: Any) -> dense.Moved:
    return dense.Moved(make, loss_type="grpo", kl_bound=0.01, **settings)


def assert_as_in_float64(trained: dense.Moved, inputs: dict[str, Any], tolerance: float = 1e-4, **step: Any) -> Tensor:
    """Loss and gradients are those of the core's functions from full logits. Returns KL after the projection."""
    old, mask = trained.batches[0][1], dense.scored_mask(inputs)
    made = troll.trust_region_step(trained.logits(inputs), troll.capture(old, inputs["completion_ids"]), **step)
    expected, _ = troll.troll_loss(made, inputs["advantages"].double(), mask)
    trained.assert_loss(inputs, expected, tolerance)
    return torch.where(mask, made.kl_after, 0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_share_a_multiplier(make, reduction):
    trained = moved(make, constraint="sequence", constraint_reduction=reduction)
    inputs, _ = trained.batches[0]
    mask = dense.scored_mask(inputs)
    constraint = Constraint.sequence(mask, reduction)
    kl = assert_as_in_float64(trained, inputs, kl_bound=0.01, constraint=constraint)
    shared = kl.sum(-1) / mask.sum(-1) if reduction == "mean" else kl.sum(-1)
    assert float(shared.max()) == pytest.approx(0.01, rel=1e-6)
    assert reduction == "sum" or float(kl.max()) > 0.01


def test_tool_tokens_have_no_say_in_a_shared_bound(make):
    trained = moved(make, change=dense.with_tools, constraint="sequence")
    inputs, _ = trained.batches[0]
    assert_as_in_float64(trained, inputs, kl_bound=0.01, constraint=Constraint.sequence(dense.scored_mask(inputs)))


def test_tokens_with_a_negative_advantage_have_a_bound_of_their_own(make):
    trained = moved(make, kl_bound_negative_ratio=0.1)
    inputs, _ = trained.batches[0]
    advantages = inputs["advantages"].unsqueeze(-1).expand(inputs["completion_ids"].shape)
    bounds = torch.where(advantages < 0, 0.001, 0.01).double()
    assert 0 < float((advantages < 0).double().mean()) < 1
    assert_as_in_float64(trained, inputs, kl_bound=bounds)


def test_bounds_follow_the_old_policys_entropy(make):
    trained = moved(make, kl_bound_entropy_exponent=1.0)
    entropies = [torch.special.entr(old.softmax(-1)).sum(-1) for _, old in trained.batches]
    masks = [dense.scored_mask(inputs) for inputs, _ in trained.batches]
    mean = torch.cat([each[mask] for each, mask in zip(entropies, masks, strict=True)]).mean()
    bounds = 0.01 * (entropies[0] / mean).clamp(0.1, 10)
    assert_as_in_float64(trained, trained.batches[0][0], 2e-4, kl_bound=bounds)


def test_a_schedule_is_logged_and_ends_where_it_should(make):
    trainer = make(kl_bound=0.1, kl_bound_schedule="linear", kl_bound_schedule_kwargs={"end": 0.02}, max_steps=4)
    trainer.train()
    bounds = logged(trainer, "trust_region/kl_bound")
    assert bounds == pytest.approx([0.1, 0.08, 0.06, 0.04])
    assert trainer.callback.kl_bound.value == pytest.approx(0.02)
    largest = logged(trainer, "trust_region/kl_after_max")
    assert all(kl <= bound * (1 + within(1e-3)) for kl, bound in zip(largest, bounds, strict=True))
    assert largest[3] == pytest.approx(0.04, rel=1e-3)


BY_AGE: dict[str, Any] = {
    "kl_bound": 0.01,
    "kl_bound_schedule": "by_age",
    "kl_bound_schedule_kwargs": {"end": 0.05, "steps": 4},
}


@pytest.mark.parametrize(
    ("delay", "ages", "settings"),
    [
        (0, [0, 1, 0, 1, 0, 1, 0, 1], {}),
        (1, [0, 1, 2, 3, 2, 3, 2, 3], {}),
        (2, [0, 1, 2, 3, 4, 5, 4, 5], {}),
        # Updates are counted, and not passes.
        (1, [0, 1, 2, 3], {"gradient_accumulation_steps": 2, "steps_per_generation": 4}),
    ],
)
def test_a_bound_by_age_follows_the_updates_since_a_rollout_was_sampled(make, delay, ages, settings):
    trainer = make(rollout_delay=delay, max_steps=len(ages), **BY_AGE, **settings)
    trainer.train()
    bounds = logged(trainer, "trust_region/kl_bound")
    assert bounds == pytest.approx([0.01 * (1 + min(age, 4)) for age in ages])
    largest = logged(trainer, "trust_region/kl_after_max")
    assert all(kl <= bound * (1 + within(1e-3)) for kl, bound in zip(largest, bounds, strict=True))


def test_a_run_that_is_resumed_within_a_rollout_begins_with_the_age_of_a_new_one(make, tmp_path):
    settings = {"rollout_delay": 1, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 5, **BY_AGE}
    make(max_steps=6, **settings).train()
    resumed = make(max_steps=8, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert logged(resumed, "trust_region/kl_bound")[-3:] == pytest.approx([0.03, 0.04, 0.03])


def test_a_controller_holds_the_projected_fraction(make):
    trainer = make(
        kl_bound=0.005,
        kl_bound_schedule="hold_projected_fraction",
        kl_bound_schedule_kwargs={"target": 0.1, "rate": 0.3, "smoothing": 0.5},
        max_steps=24,
    )
    trainer.train()
    bounds, fractions = (logged(trainer, f"trust_region/{name}") for name in ("kl_bound", "projected_fraction"))
    assert max(bounds) > 0.006
    # The measurements that the controller saw are those that are logged.
    replayed = trainer.args.make_bound(total_steps=24)
    kls = logged(trainer, "trust_region/kl_before_mean")
    for step, (fraction, kl, bound) in enumerate(zip(fractions, kls, bounds, strict=True), start=1):
        assert replayed.value == pytest.approx(bound, rel=1e-4)
        replayed.update(step, BoundStatistics(fraction, kl))


def test_epsilon_rests_while_the_critic_warms_up(make):
    """The policy does not move then: nothing is projected, which says nothing about ε."""
    holds = {"kl_bound_schedule": "hold_projected_fraction", "kl_bound_schedule_kwargs": {"target": 0.1, "rate": 0.5}}
    trainer = make(advantage_estimator="gae", critic_kwargs={"warmup_steps": 3}, max_steps=6, **holds)
    trainer.train()
    bounds = logged(trainer, "trust_region/kl_bound")
    assert bounds[:4] == [0.05] * 4
    assert bounds[5] != 0.05
