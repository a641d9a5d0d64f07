import random

import pytest
from scipy import stats

from troll.study.statistics import paired_difference, rank_correlation, success_estimate, t_interval, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 49, 200])
def test_t_quantile(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-12)


def test_t_quantile_needs_a_degree_of_freedom() -> None:
    with pytest.raises(ValueError, match="degrees must be at least 1, got 0"):
        t_quantile(0)


def test_t_interval() -> None:
    values = [0.61, 0.7, 0.58, 0.66]
    expected = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected, rel=1e-12)
    assert t_interval([0.5]) is None


def test_success_of_several_seeds_and_of_one() -> None:
    several = success_estimate([0.5, 0.7], answers=100)
    assert (several.mean, several.size, several.method) == (pytest.approx(0.6), 2, "t")
    assert several.spread == pytest.approx(stats.tstd([0.5, 0.7]))
    one = success_estimate([0.3], answers=50)
    assert one.interval == pytest.approx(stats.binomtest(15, 50).proportion_ci(0.95, method="wilson"), rel=1e-9)
    assert (one.spread, one.size, one.method) == (None, 1, "wilson")
    unknown = success_estimate([0.3], answers=None)
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


def test_rank_correlation() -> None:
    rng = random.Random(1)
    first = [rng.choice([1.0, 2.0, 3.0, 4.0]) for _ in range(30)]
    second = [value + rng.gauss(0, 1) for value in first]
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, rel=1e-9)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
