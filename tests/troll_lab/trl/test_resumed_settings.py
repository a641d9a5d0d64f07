"""A resumed run says which of the laboratory's settings are not those of its checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.troll.trl.test_resumed_settings import SAVED
from tests.troll_lab.trl.test_config import config
from troll.trl import resumed_settings
from troll_lab.trl import LabConfig

GAE = {"advantage_estimator": "gae"}


def change(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    there = json.dumps(resumed_settings.settings(config(tmp_path, **before)), allow_nan=False)
    return resumed_settings.changed_settings(json.loads(there), resumed_settings.settings(config(tmp_path, **after)))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            {**GAE, "critic_kwargs": {"learning_rate": 1e-4}},
            {**GAE, "critic_kwargs": {"learning_rate": 1e-3}},
            "critic_kwargs.learning_rate was 0.0001 and is 0.001",
        ),
        (
            {**GAE, "critic_kwargs": {"weight_decay": 0.0}},
            {**GAE, "critic_kwargs": {"weight_decay": 0.1}},
            "critic_kwargs.weight_decay was 0.0 and is 0.1. The optimizer keeps the critic_kwargs.weight_decay of the "
            "checkpoint",
        ),
        ({}, {"rollout_delay": 1}, "rollout_delay was 0 and is 1"),
        ({}, {"eval_temperature": 0.5}, None),
    ],
)
def test_changed_settings_names_each_with_both_values(tmp_path, before, after, says):
    assert change(tmp_path, before, after) == says


def test_settings_hold_every_field_of_the_configuration(tmp_path):
    known = {name.partition(".")[0] for name in resumed_settings.settings(config(tmp_path))}
    own = {name for name in LabConfig.__annotations__ if not name.startswith(("_", "eval_"))}
    assert own - known == {"critic_kwargs"}, "a dictionary, of which every entry is a setting"


def test_a_resumed_critic_has_the_rate_of_the_settings(make, tmp_path):
    """Which the warning says."""
    make(advantage_estimator="gae", **SAVED).train()
    changed = {"learning_rate": 1e-3, "weight_decay": 0.1}
    trainer = make(advantage_estimator="gae", critic_kwargs=changed, **{**SAVED, "max_steps": 4})
    with pytest.warns(UserWarning, match="^resuming from checkpoint-2 with .* keeps the critic_kwargs.weight_decay of"):
        trainer.train(resume_from_checkpoint=True)
    groups = trainer.critic.optimizer.param_groups
    assert {group["lr"] for group in groups} == {1e-3} and {group["weight_decay"] for group in groups} == {0.0}
