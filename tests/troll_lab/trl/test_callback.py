"""The callback of the laboratory's trainer: what its parts say about the trust region of an update."""

import pytest

from tests.troll.trl.test_monitor import IDLE, PROJECTS_NONE, said
from troll.trl import monitor


@pytest.mark.parametrize(
    ("settings", "steps", "idle"),
    [
        # The critic's warm-up leaves the policy as it is.
        ({"advantage_estimator": "gae", "critic_kwargs": {"warmup_steps": 8}}, 12, 0),
        # A rollout of old weights has an age at once.
        ({"rollout_delay": 1}, 5, 1),
    ],
    ids=str,
)
def test_training_warns_of_no_projection_where_policies_moved(make, monkeypatch, recwarn, settings, steps, idle):
    monkeypatch.setattr(monitor, "IDLE_UPDATES", 3)
    make(max_steps=steps, logging_steps=100, **PROJECTS_NONE, **settings).train()
    assert len(said(recwarn, IDLE)) == idle
