"""Tests of paired differences, and the choice of a learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from troll_lab.evaluation.estimators import Interval

_MOST_EXACT = 20  # differences of which all sign flips are tried: about a million
_BLOCK = 1000  # bootstrap samples held in memory at once


def sign_flip_p_value(
    differences: Sequence[float], alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """The p-value of the mean paired difference, by flipping signs.

    If two methods are equally good, a seed's difference is as likely as its negative. The p-value is the share of all
    sign patterns whose mean is at least as far from 0 (or at least as large) as the observed one: exact for up to 20
    differences, so never below 2 / 2ⁿ (or 1 / 2ⁿ); for more, from a million random patterns with a fixed seed.

    Args:
        differences: The difference of each seed, at least one.
        alternative: "two-sided"; or "greater", if only a mean above 0 counts against equality.

    Raises:
        ValueError: If `differences` is empty.
    """
    if not differences:
        raise ValueError("a sign-flip test needs at least one difference")
    if len(differences) > _MOST_EXACT:
        # For all patterns of 20, this takes hundreds of times as long as the lines below.
        found = stats.permutation_test(
            (np.asarray(differences),),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=2**_MOST_EXACT,
            batch=2**14,
            alternative=alternative,
            rng=np.random.default_rng(0),
        )
        return float(found.pvalue)
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    rounding = 1e-12 * sum(map(abs, differences))
    if alternative == "greater":
        return float(np.mean(sums >= sum(differences) - rounding))
    return float(np.mean(np.abs(sums) >= abs(sum(differences)) - rounding))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values: below 0.05 they keep the chance of any false finding among them below 0.05.

    The smallest of m p-values is multiplied by m, the next by m − 1, and so on; none becomes smaller than the last one.

    Args:
        p_values: The p-values of all tests of the family. A test that is not made yet counts with 1.

    Returns:
        The corrected values in the same order, at most 1.
    """
    corrected: list[float] = multipletests(p_values, method="holm")[1].tolist()
    return corrected


def equivalence_p_value(differences: Sequence[float], margin: float) -> float | None:
    """The p-value of two one-sided t tests (TOST); below 0.05 the methods are equivalent within the margin.

    The null hypothesis is that the mean difference is at least `margin` away from 0.

    Args:
        differences: The difference of each seed.
        margin: Above 0, in the unit of the differences.

    Returns:
        The larger p-value of the two tests; None for fewer than two differences.

    Raises:
        ValueError: If `margin` is not above 0.
    """
    if margin <= 0:
        raise ValueError(f"margin must be above 0, got {margin}")
    if len(differences) < 2:
        return None
    if stdev(differences) == 0:  # then t is infinite
        return 0.0 if abs(differences[0]) < margin else 1.0
    return float(ttost_paired(np.asarray(differences), np.zeros(len(differences)), -margin, margin)[0])


def crossed_bootstrap_interval(differences: ArrayLike, questions: ArrayLike, resamples: int = 10_000) -> Interval:
    """The 95 % interval of a mean over seeds and questions, both taken as samples.

    Every seed's run answers the same draws, and draws of one question are correlated. So seeds and questions are
    resampled with replacement, independently of each other, and a question is taken with all its draws and its answers
    by all seeds (Owen, 2007, "The pigeonhole bootstrap"). The ends of the interval are percentiles. It tends to be too
    wide rather than too narrow, but not with few seeds: below ten, prefer `t_interval`.

    Args:
        differences: The values to average, (seeds, draws), such as one method's verdicts minus another's.
        questions: The question of each draw, (draws,) integers.
        resamples: The number of bootstrap samples, whose random numbers are always the same.

    Raises:
        ValueError: If the shapes do not fit, or there are fewer than two seeds or questions.
    """
    values, asked = np.asarray(differences, dtype=float), np.asarray(questions)
    if values.ndim != 2 or values.shape[1:] != asked.shape:
        raise ValueError(
            f"differences must be (seeds, draws) and questions (draws,), got {values.shape} and {asked.shape}"
        )
    names, place = np.unique(asked, return_inverse=True)
    if len(values) < 2 or len(names) < 2:
        raise ValueError(f"at least two seeds and two questions are needed, got {len(values)} and {len(names)}")
    totals = np.stack([np.bincount(place, row, len(names)) for row in values])  # (seeds, questions)
    draws = np.bincount(place)
    rng = np.random.default_rng(0)
    means: list[NDArray[np.float64]] = []
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        by_seed, by_question = _resampled(len(values), size, rng), _resampled(len(names), size, rng)
        sums = ((by_seed @ totals) * by_question).sum(-1)
        means.append(sums / (len(values) * (by_question @ draws)))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def _resampled(items: int, samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Counts of each item in samples of `items` items with replacement, (samples, items)."""
    drawn = rng.integers(items, size=(samples, items)) + items * np.arange(samples)[:, None]
    return np.bincount(drawn.ravel(), minlength=samples * items).reshape(samples, items)


def leave_one_out_choice(values: Mapping[float, Mapping[int, float]]) -> dict[int, float]:
    """For each seed, the learning rate with the best mean over the other seeds.

    So a seed's own luck does not help its result. It can hurt if two rates are about equal: a seed that is good at one
    of them is missing from that rate's mean, and tends to get the other. Of equal means, the smaller rate is chosen.

    Args:
        values: The values by rate and then by seed. Only seeds that have a value at every rate count.

    Returns:
        The rate of each of these seeds; empty if there are fewer than two.
    """
    common = sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))) if values else []
    if len(common) < 2:
        return {}

    def best(left_out: int) -> float:
        others = [seed for seed in common if seed != left_out]
        return max(sorted(values), key=lambda rate: fmean(values[rate][seed] for seed in others))

    return {seed: best(seed) for seed in common}


def range_within(means: Mapping[float, float], share: float = 0.9) -> tuple[float, float]:
    """The learning rates around the best one with at least a share of its value.

    Between two rates, the value is interpolated linearly in the logarithm of the rate, as in a plot.

    Args:
        means: The mean value by rate, at least one; all at least 0.
        share: The share of the best value, in (0, 1].

    Returns:
        The lowest and the highest rate. If it is the first or the last rate of `means`, the data end there, and the
        true range may be wider.
    """
    rates = sorted(means)
    best = max(range(len(rates)), key=lambda i: means[rates[i]])
    wanted = share * means[rates[best]]

    def reach(step: int) -> float:
        last = best
        while 0 <= last + step < len(rates) and means[rates[last + step]] >= wanted:
            last += step
        if not 0 <= last + step < len(rates) or means[rates[last]] == wanted:
            return rates[last]
        inside, outside = rates[last], rates[last + step]
        way = (means[inside] - wanted) / (means[inside] - means[outside])
        return inside * (outside / inside) ** way

    return reach(-1), reach(1)
