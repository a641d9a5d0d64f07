"""What every kind of bound has in common: its state, and the statistics that it takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.trust_region.bounds.kinds import OPTIONS
from troll.trust_region.bounds import BOUNDS, BoundStatistics, make_bound


def random_statistics(seed, count):
    rng = np.random.default_rng(seed)
    return [BoundStatistics(float(f), float(kl)) for f, kl in zip(rng.random(count), rng.random(count), strict=True)]


def test_every_kind_is_covered_here():
    assert OPTIONS.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_resumes_exactly_through_json(name):
    made = [make_bound(name, 0.05, total_steps=100, **OPTIONS[name]) for _ in range(2)]
    statistics = random_statistics(0, 40)
    for step, measured in enumerate(statistics[:17], start=1):
        made[0].update(step, measured)
    made[1].load_state_dict(json.loads(json.dumps(made[0].state_dict())))
    for step, measured in enumerate(statistics[17:], start=18):
        assert made[1].value == made[0].value
        for bound in made:
            bound.update(step, measured)
    assert made[1].state_dict() == made[0].state_dict()


@pytest.mark.parametrize("name", OPTIONS)
def test_refuses_the_state_of_another_kind(name):
    bound = make_bound(name, 0.05, total_steps=100, **OPTIONS[name])
    for other in OPTIONS.keys() - {name}:
        state = make_bound(other, 0.05, total_steps=100, **OPTIONS[other]).state_dict()
        with pytest.raises(ValueError, match=f"'{name}' bound, got '{other}'"):
            bound.load_state_dict(state)
    with pytest.raises(ValueError, match="got None"):
        bound.load_state_dict({})
    with pytest.raises(ValueError, match="state must hold kind"):
        bound.load_state_dict(bound.state_dict() | {"more": 1})


@pytest.mark.parametrize(("fraction", "kl"), [(-0.1, 0.0), (1.1, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)])
def test_refuses_statistics_that_are_none(fraction, kl):
    with pytest.raises(ValueError, match=r"projected_fraction must|kl must"):
        BoundStatistics(fraction, kl)
