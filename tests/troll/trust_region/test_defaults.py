"""The defaults of the public functions are those of the design."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import troll

STEP = {"kl_bound": 0.05, "constraint": None, "pull": "projection"}
LOSS = {"regression_weight": 1.0, "ratio_level": "token", "aggregation": "sequence_mean", "max_length": None}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (troll.capture, {"top_k": 64, "mass_threshold": 1e-5, "truncation": None}),
        (troll.capture_top, {"top_k": 64, "mass_threshold": 1e-5, "truncated": False, "temperature": None}),
        (troll.project, {"kl_bound": 0.05, "constraint": None}),
        (troll.trust_region_step, STEP | {"entropy": False}),
        (troll.troll_loss, LOSS | {"num_tokens": None}),
    ],
)
def test_defaults_are_those_of_the_design(function: Callable[..., Any], expected: dict[str, Any]):
    parameters = inspect.signature(function).parameters.values()
    assert {each.name: each.default for each in parameters if each.default is not each.empty} == expected
