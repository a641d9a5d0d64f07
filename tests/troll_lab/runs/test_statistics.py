import random

import pytest
from scipy import stats

from troll_lab.runs.statistics import paired_difference, seed_mean, t_interval


def test_t_interval() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0.6, 0.1) for _ in range(4)]
    expected = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected, rel=1e-12)
    assert t_interval([0.5]) is None
    assert t_interval([0.5, 0.5]) == (0.5, 0.5)


def test_success_of_several_seeds_and_of_one() -> None:
    several = seed_mean([0.5, 0.7], answers=100)
    assert (several.mean, several.size, several.method) == (pytest.approx(0.6), 2, "t")
    assert several.spread == pytest.approx(stats.tstd([0.5, 0.7]))
    one = seed_mean([0.3], answers=50)
    assert one.interval == pytest.approx(stats.binomtest(15, 50).proportion_ci(0.95, method="wilson"), rel=1e-9)
    assert (one.spread, one.size, one.method) == (None, 1, "wilson")
    unknown = seed_mean([0.3], answers=None)
    assert (unknown.interval, unknown.method) == (None, None)


def test_paired_difference_is_over_common_seeds() -> None:
    rng = random.Random(0)
    first = {seed: 0.6 + rng.gauss(0, 0.1) for seed in range(6)}
    second = {seed: value - 0.05 + rng.gauss(0, 0.01) for seed, value in first.items()}
    found = paired_difference(first | {9: 1.0}, second | {8: 0.0})
    assert found is not None
    expected = stats.ttest_rel(list(first.values()), list(second.values())).confidence_interval(0.95)
    assert found.interval == pytest.approx(expected, rel=1e-9)
    assert found.size == 6
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    single = paired_difference({0: 0.75}, {0: 0.5})
    assert single is not None
    assert (single.mean, single.interval) == (0.25, None)
