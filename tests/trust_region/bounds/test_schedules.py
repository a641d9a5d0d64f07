"""Fixed bounds and schedules: closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.trust_region.bounds.kinds import NOTHING
from troll.trust_region.bounds import Bound, BoundStatistics, make_bound
from troll.trust_region.bounds.schedules import Cosine, Linear


def values(bound: Bound, steps: int) -> list[float]:
    """ε before the first step, and after each."""
    found = [bound.value]
    for step in range(1, steps + 1):
        bound.update(step, NOTHING)
        found.append(bound.value)
    return found


def test_fixed_never_moves():
    bound = make_bound("fixed", 0.05)
    for step in range(1, 20):
        bound.update(step, BoundStatistics(projected_fraction=1.0, kl=9.0))
    assert bound.value == 0.05
    assert make_bound("fixed", math.inf).value == math.inf


def test_linear_is_a_straight_line_and_then_flat():
    np.testing.assert_allclose(
        values(make_bound("linear", 0.2, end=0.1, steps=4), 6), [0.2, 0.175, 0.15, 0.125, 0.1, 0.1, 0.1], rtol=1e-14
    )


def test_cosine_is_half_a_wave_and_then_flat():
    found = values(make_bound("cosine", 0.1, end=0.3, steps=8), 10)
    expected = [0.2 - 0.1 * math.cos(math.pi * min(step, 8) / 8) for step in range(11)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_schedules_last_the_whole_training_a_fraction_or_a_number_of_steps(name):
    whole = values(make_bound(name, 0.2, total_steps=40, end=0.1), 40)
    assert values(make_bound(name, 0.2, total_steps=80, end=0.1, steps=0.5), 40) == whole
    assert values(make_bound(name, 0.2, end=0.1, steps=40), 40) == whole
    assert whole[-1] == 0.1
    assert all(a > b for a, b in itertools.pairwise(whole))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0.05, end=0.1), "total_steps must be at least 1 if steps is None, got None"),
        (lambda: Linear(0.05, 0, end=0.1), "total_steps must be at least 1 if steps is None, got 0"),
        (lambda: Linear(0.05, end=0.1, steps=0.5), "total_steps .* a fraction, got None"),
        (lambda: Linear(0.05, 9, end=0.0), "end must be above 0 and finite, got 0.0"),
        (lambda: Linear(math.inf, 9, end=0.1), "kl_bound must be .* finite"),
        (lambda: Cosine(0.05, end=0.1, steps=0), "steps must be .* got 0"),
        (lambda: Cosine(0.05, end=0.1, steps=1.5), "steps must be .* got 1.5"),
    ],
)
def test_refuses_what_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
