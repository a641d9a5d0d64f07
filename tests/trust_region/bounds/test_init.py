"""make_bound: names, and what it says of options that do not fit."""

from __future__ import annotations

import math

import pytest

from tests.trust_region.bounds.kinds import OPTIONS
from troll.trust_region.bounds import BOUNDS, BoundStatistics, make_bound


def test_every_kind_is_found_by_its_name():
    for name, options in OPTIONS.items():
        bound = make_bound(name, 0.05, total_steps=100, **options)
        assert type(bound) is BOUNDS[name] and bound.kind == name
        assert bound.value == 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "square"}, "bound must be one of fixed, .*'square'"),
        ({"name": "fixed", "kl_bound": 0.0}, "kl_bound must be above 0, got 0.0"),
        ({"name": "fixed", "kl_bound": math.nan}, "kl_bound must be above 0"),
        ({"name": "fixed", "end": 0.1}, "none; got end"),
        ({"name": "linear"}, "needs end"),
        ({"name": "hold_kl", "rate": 0.1}, "the 'hold_kl' bound needs target, got rate"),
        ({"name": "linear", "end": 0.1, "tarket": 1.0, "total_steps": 9}, "end, steps; got tarket"),
        ({"name": "cosine", "end": "1e-3", "steps": 5}, "end must be a number, got '1e-3'"),
        ({"name": "cosine", "end": True, "steps": 5}, "end must be a number, got True"),
        ({"name": "hold_kl", "target": None}, "target must be a number, got None"),
        ({"name": "hold_kl", "target": 0.0}, "target must be above 0"),  # what the class refuses
    ],
)
def test_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_bound(**({"kl_bound": 0.05} | arguments))


def test_none_stands_for_the_default_of_an_option_that_has_it():
    made = [make_bound("linear", 0.05, total_steps=10, end=0.1, **options) for options in ({}, {"steps": None})]
    for bound in made:
        bound.update(4, BoundStatistics(projected_fraction=0.0, kl=0.0))
    assert made[0].value == made[1].value == pytest.approx(0.07)
