"""Means over seeds and paired differences, with their 95 % intervals.

SciPy is imported inside functions: training imports modules that import this one, and must neither wait for SciPy nor
need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from troll_lab.evaluation.estimators import Interval, wilson_interval


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes:
        spread: The standard deviation (n − 1) of the values; None for a single value.
        size: The number of values.
        interval: The 95 % interval of the mean; None if nothing is known about it.
        method: The kind of interval: Student's t over the seeds, or Wilson's over the answers of a single seed.
    """

    mean: float
    spread: float | None
    size: int
    interval: Interval | None
    method: Literal["t", "wilson"] | None


def t_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError('intervals need SciPy: pip install "troll-rl[report]"') from error
    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def seed_mean(values: Sequence[float], answers: int | None = None) -> SeedMean:
    """The mean over seeds with its interval; the noise of the answers is a part of the spread between seeds.

    Args:
        values: The value of each seed, at least one.
        answers: The number of independent answers of which a success is the mean, used for a single seed; None for
            other values.
    """
    if len(values) > 1:
        return SeedMean(fmean(values), stdev(values), len(values), t_interval(values), "t")
    if answers is None:
        return SeedMean(values[0], None, 1, None, None)
    return SeedMean(values[0], None, 1, wilson_interval(values[0], answers), "wilson")


def seed_differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """First − second for each seed that both have, in the order of the seeds."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> SeedMean | None:
    """The mean of first − second over the seeds that both have, with the paired t interval; None if they share none.

    The influence of the seed (the initial model, the order of the problems) cancels in each difference.
    """
    differences = seed_differences(first, second)
    return seed_mean(differences) if differences else None
