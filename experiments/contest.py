"""Methods at their best: each at its own learning rate if several were run, and the contrasts between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.inference import (
    equivalence_p_value,
    holm,
    leave_one_out_choice,
    range_within,
    sign_flip_p_value,
)
from troll_lab.runs.comparison import C, Comparison, Difference, Group, Method, Row, rivals
from troll_lab.runs.statistics import SeedMean, seed_differences, seed_mean

RATE = "learning_rate"
#: Methods whose success differs by less than this are as good as each other.
MARGIN = 0.05


@dataclass(frozen=True)
class Contestant(Method):
    """A method with all learning rates that it was run with; its row is without them.

    Attributes:
        groups: Its runs by learning rate, in ascending order; a single entry if there was no choice.
    """

    groups: Mapping[float, Group]

    @cached_property
    def means(self) -> dict[float, float]:
        """The mean final result by learning rate."""
        return {rate: group.final.mean for rate, group in self.groups.items() if group.final is not None}

    @cached_property
    def rates(self) -> dict[int, float]:
        """The learning rate of each seed, chosen by the mean of the other seeds; empty if there was no choice."""
        return leave_one_out_choice(self._finals) if len(self.groups) > 1 else {}

    @cached_property
    def finals(self) -> dict[int, float]:
        """The final result of each seed, at its learning rate."""
        if len(self.groups) == 1:
            return next(iter(self._finals.values()))
        return {seed: self._finals[rate][seed] for seed, rate in self.rates.items()}

    @property
    def final(self) -> SeedMean | None:
        """The mean of the final results over seeds; None if there are none."""
        if len(self.groups) == 1:
            return next(iter(self.groups.values())).final
        return seed_mean(list(self.finals.values())) if self.finals else None

    @property
    def left_out(self) -> list[int]:
        """The seeds that have no result at one of the learning rates, and so none when tuned."""
        return sorted({seed for finals in self._finals.values() for seed in finals} - self.finals.keys())

    @property
    def range(self) -> tuple[float, float] | None:
        """The learning rates within 90 % of the best result; None without a choice, or if every result is 0."""
        if len(self.means) < 2 or min(self.means.values()) < 0 or max(self.means.values()) == 0:
            return None
        return range_within(self.means)

    @property
    def _finals(self) -> dict[float, dict[int, float]]:
        return {rate: group.finals for rate, group in self.groups.items() if group.finals}


@dataclass(frozen=True)
class Contrast(Difference[C]):
    """The difference between two methods, each at its learning rate, with its tests.

    Attributes:
        p_value: The two-sided p-value by sign flips.
        equivalence: The p-value of a difference of the margin or more; None for rewards, and for a single seed.
        corrected: The p-value by sign flips after Holm's correction; None if it is not one of the tests.
    """

    p_value: float
    equivalence: float | None
    corrected: float | None = None


def rate_text(rate: float, digits: int = 7) -> str:
    """A learning rate as people write it, such as 3e-5, with at most `digits` digits."""
    mantissa, exponent = f"{rate:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def counts_text(rates: Iterable[float], digits: int = 7) -> str:
    """Learning rates, each followed by how often it occurs, such as 1e-4 (1), 3e-4 (5)."""
    return ", ".join(f"{rate_text(rate, digits)} ({count})" for rate, count in sorted(Counter(rates).items()))


def range_text(found: tuple[float, float], rates: Iterable[float]) -> str:
    """A range of learning rates, with ≤ and ≥ where the rates that were run end."""
    (low, high), ends = found, sorted(rates)
    below, above = "≤ " if low == ends[0] else "", "≥ " if high == ends[-1] else ""
    return f"{below}{rate_text(low, 2)} to {above}{rate_text(high, 2)}"


def contestants(comparison: Comparison) -> list[Contestant]:
    """The methods, in the order of the comparison's groups."""
    found: dict[tuple[Row, str], dict[float, Group]] = {}
    for group in comparison.groups:
        row = tuple(entry for entry in group.row if entry[0] != RATE)
        named = dict(group.row).get(RATE, "nan")
        if named == "default":
            raise ValueError("some of the runs name their learning_rate and some have its default: name it in all")
        rate = float(named)
        found.setdefault((row, group.surrogate), {})[rate] = group
    measure = comparison.measure
    return [Contestant(row, name, measure, dict(sorted(groups.items()))) for (row, name), groups in found.items()]


def contrasts(methods: Sequence[Contestant]) -> list[Contrast[Contestant]]:
    """TROLL (or else the first surrogate) minus each other method of its row, corrected over all of them.

    Returns:
        The contrasts; none with a single surrogate. Methods without a common seed are left out.
    """
    found = contrasts_of(rivals(methods), MARGIN)
    return [
        replace(one, corrected=p_value, equivalence=one.equivalence if one.first.measure == "success" else None)
        for one, p_value in zip(found, holm([one.p_value for one in found]), strict=True)
    ]


def contrasts_of(pairs: Sequence[tuple[C, C]], margin: float) -> list[Contrast[C]]:
    """The first minus the second of each pair that has a common seed.

    Args:
        pairs: The methods.
        margin: Differences within this make two methods equivalent.
    """
    compared = [(one, other, seed_differences(one.finals, other.finals)) for one, other in pairs]
    return [
        Contrast(
            *(one, other, seed_mean(differences)),
            p_value=sign_flip_p_value(differences),
            equivalence=equivalence_p_value(differences, margin),
        )
        for one, other, differences in compared
        if differences
    ]
