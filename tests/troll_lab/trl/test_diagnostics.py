"""Metrics with the laboratory's settings where there is nothing to measure."""

import pytest

from tests.troll.trl.test_diagnostics import assert_no_nan_where_all_are_masked
from troll.trl.estimators import ESTIMATORS


@pytest.mark.parametrize(
    "settings",
    [
        *({"advantage_estimator": name} for name, each in ESTIMATORS.items() if each.laboratory),
        {"advantage_estimator": "gae", "critic_kwargs": {"warmup_steps": 1}},
        {"rollout_delay": 1, "anchor": "rollout"},
        {"resampling_rounds": 1},
        {"eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=str,
)
def test_no_metric_is_nan_where_all_completions_are_masked(make, settings, monkeypatch):
    assert_no_nan_where_all_are_masked(make, monkeypatch, **settings)
