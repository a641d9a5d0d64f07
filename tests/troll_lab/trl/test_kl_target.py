"""What the laboratory adds to a learning rate that follows a KL target: old rollouts, and a critic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.troll.ages import kept_ages
from tests.troll.trl.test_kl_target import TARGET, run, walk
from troll_lab.trl import LabConfig, LabTrainer


@pytest.mark.parametrize(("anchor", "staleness"), [("old", 0), ("rollout", 6)])
def test_an_old_policy_is_as_old_as_the_rollout_it_sampled(make, monkeypatch, anchor, staleness):
    """The KL is measured from the anchor: the network that scored the rollout, or the older one that sampled it."""
    ages = kept_ages(monkeypatch)
    trainer, _ = run(make, LabTrainer, rollout_delay=3, anchor=anchor, steps_per_generation=2, max_steps=10)
    assert trainer.args.anchor_staleness == staleness
    # The delay grows to three rollouts of two updates, as there are older weights.
    behind = [min(rollout, 3) * 2 if staleness else 0 for rollout in range(5)]
    assert ages == [age + update for age in behind for update in (0, 1)]


def test_an_interrupted_rollout_counts_with_the_updates_that_it_had(make, tmp_path, monkeypatch):
    """The resumed run samples a new rollout, with weights that are one update old."""
    settings: dict[str, Any] = {"anchor": "rollout", "rollout_delay": 1, "steps_per_generation": 4, "max_steps": 13}
    settings |= {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 5}
    run(make, LabTrainer, **settings)
    ages = kept_ages(monkeypatch)
    make(LabTrainer, **TARGET | settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert ages == [1, 2, 3, 4, *range(4, 8)]


def test_one_update_a_rollout_says_nothing_whatever_the_delay(tmp_path):
    with pytest.raises(ValueError, match="kl_target needs updates_per_rollout of at least 2, got 1"):
        LabConfig(str(tmp_path), kl_target=0.1, updates_per_rollout=1, rollout_delay=3, use_cpu=True, bf16=False)


def test_a_critic_keeps_its_rate_and_its_warm_up_moves_nothing(make):
    critic: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 10}
    trainer, keep = run(make, LabTrainer, advantage_estimator="gae", critic_kwargs=critic)
    assert trainer.critic is not None
    assert [group["lr"] for group in trainer.critic.optimizer.param_groups] == [3e-3] * 2
    assert {*walk(trainer)[:10]} == {0.0} and min(walk(trainer)[10:]) > 0
    assert {*keep.found[:11]} == {1e-4} and keep.found[-1] > 1e-4
