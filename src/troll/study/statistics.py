"""Means over seeds, and how sure one can be of them.

One quantile of Student's t is all that is needed, so SciPy is no dependency of the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, stdev
from typing import Literal

from troll.evaluation.estimators import Interval, wilson_interval


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: Of the values.
        spread: Their standard deviation (n − 1); None for a single one.
        size: How many there are.
        interval: The 95 % interval of the mean; None where nothing is known about it.
        method: What the interval is: Student's t over the seeds, Wilson's over the answers of a single seed.
    """

    mean: float
    spread: float | None
    size: int
    interval: Interval | None
    method: Literal["t", "wilson"] | None


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: half the width of a 95 % interval, in standard errors.

    Bisects the closed form of P(|T| < t) for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4), which
    is a finite sum in θ = atan(t / √degrees).

    Args:
        degrees: Degrees of freedom, at least 1.

    Raises:
        ValueError: If `degrees` is below 1.
    """
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1, got {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _central_mass(theta, degrees) < 0.95 else (low, theta)
    return math.sqrt(degrees) * math.tan(low)


def _central_mass(theta: float, degrees: int) -> float:
    cosine = math.cos(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    total *= math.sin(theta)
    return (theta + total) * 2 / math.pi if odd else total


def t_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def success_estimate(successes: Sequence[float], answers: int | None) -> Estimate:
    """The mean success over seeds, in which the answers' noise is part of the spread between seeds.

    Args:
        successes: Of each seed, in [0, 1]; at least one.
        answers: To how many problems each was measured on; used for a single seed. None if unknown.
    """
    if len(successes) > 1:
        return Estimate(fmean(successes), stdev(successes), len(successes), t_interval(successes), "t")
    if answers is None:
        return Estimate(successes[0], None, 1, None, None)
    return Estimate(successes[0], None, 1, wilson_interval(successes[0], answers), "wilson")


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """The mean of first − second over the seeds that both have, with the paired t interval; None if they share none.

    What a seed fixes (the initial model, the order of the problems) cancels in each difference.

    Args:
        first: Value by seed.
        second: Likewise.
    """
    differences = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if not differences:
        return None
    interval = t_interval(differences)
    spread = stdev(differences) if len(differences) > 1 else None
    return Estimate(fmean(differences), spread, len(differences), interval, "t" if interval else None)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties by their mean rank; None for fewer than three pairs or a constant."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]
