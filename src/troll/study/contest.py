"""Methods at their best: each with a learning rate of its own where several were run, and what sets them apart then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from troll.study.comparison import DEFAULT_SURROGATE, Comparison, Group, Measure, Row, agree, row_label
from troll.study.statistics import (
    Estimate,
    equivalence_p_value,
    holm,
    leave_one_out_choice,
    paired_difference,
    range_within,
    seed_differences,
    sign_flip_p_value,
    success_estimate,
)

RATE = "learning_rate"
#: Methods whose success differs by less than this are as good as each other.
MARGIN = 0.05


@dataclass(frozen=True)
class Contestant:
    """A method in a row of the table, with all learning rates that it was run with.

    Attributes:
        row: What sets it apart from others of its surrogate, without the learning rate.
        surrogate: The method.
        groups: Its runs by learning rate, in ascending order; a single entry where there was no choice.
    """

    row: Row
    surrogate: str
    groups: Mapping[float, Group]

    @property
    def label(self) -> str:
        """The method in words."""
        return " ".join(filter(None, [row_label(self.row), self.surrogate]))

    @property
    def measure(self) -> Measure:
        """What it is compared by."""
        return next(iter(self.groups.values())).measure

    @cached_property
    def means(self) -> dict[float, float]:
        """The mean final result by learning rate."""
        return {rate: group.final.mean for rate, group in self.groups.items() if group.final is not None}

    @cached_property
    def rates(self) -> dict[int, float]:
        """The learning rate of each seed, chosen by the mean of the other seeds; empty where there was no choice."""
        return leave_one_out_choice(self._finals) if len(self.groups) > 1 else {}

    @cached_property
    def finals(self) -> dict[int, float]:
        """The final result of each seed, at its learning rate."""
        if len(self.groups) == 1:
            return next(iter(self._finals.values()))
        return {seed: self._finals[rate][seed] for seed, rate in self.rates.items()}

    @property
    def final(self) -> Estimate | None:
        """Its mean over seeds."""
        if len(self.groups) == 1:
            return next(iter(self.groups.values())).final
        return success_estimate(list(self.finals.values()), None) if self.finals else None

    @property
    def range(self) -> tuple[float, float] | None:
        """The learning rates within 90 % of the best one; None where there was no choice, or nothing was reached."""
        if len(self.means) < 2 or min(self.means.values()) < 0 or max(self.means.values()) == 0:
            return None
        return range_within(self.means)

    @property
    def _finals(self) -> dict[float, dict[int, float]]:
        return {rate: group.finals for rate, group in self.groups.items()}


@dataclass(frozen=True)
class Contrast:
    """How much better one method is than another, seed by seed, each at its learning rate.

    Attributes:
        first: The one.
        second: The other.
        estimate: Of the mean difference.
        p_value: By flipping signs, two-sided.
        corrected: The same by Holm's correction over all contrasts of the comparison.
        equivalence: The p-value of a difference of `MARGIN` or more; None for rewards, and for a single seed.
    """

    first: Contestant
    second: Contestant
    estimate: Estimate
    p_value: float
    corrected: float
    equivalence: float | None


def rate_text(rate: float, digits: int = 7) -> str:
    """A learning rate as people write it, with at most so many digits: 3e-5."""
    mantissa, exponent = f"{rate:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def contestants(comparison: Comparison) -> list[Contestant]:
    """The methods, in the order of the comparison's groups."""
    found: dict[tuple[Row, str], dict[float, Group]] = {}
    for group in comparison.groups:
        row = tuple(entry for entry in group.row if entry[0] != RATE)
        rate = float(dict(group.row).get(RATE, "nan"))
        found.setdefault((row, group.surrogate), {})[rate] = group
    return [Contestant(row, name, dict(sorted(groups.items()))) for (row, name), groups in found.items()]


def contrasts(methods: Sequence[Contestant]) -> list[Contrast]:
    """TROLL (or else the first surrogate) minus each other method of its row.

    Returns:
        Nothing with a single surrogate; methods without a common seed are left out.
    """
    surrogates = [method.surrogate for method in methods]
    base = DEFAULT_SURROGATE if DEFAULT_SURROGATE in surrogates else next(iter(surrogates), "")
    pairs = [
        (one, other)
        for one in methods
        for other in methods
        if one.surrogate == base != other.surrogate and agree(one.row, other.row)
    ]
    found = []
    for one, other in pairs:
        estimate = paired_difference(one.finals, other.finals)
        if estimate is not None:
            found.append((one, other, estimate, seed_differences(one.finals, other.finals)))
    p_values = [sign_flip_p_value(differences) for *_, differences in found]
    return [
        Contrast(
            *(one, other, estimate, p_value, corrected),
            equivalence=equivalence_p_value(differences, MARGIN) if one.measure == "success" else None,
        )
        for (one, other, estimate, differences), p_value, corrected in zip(found, p_values, holm(p_values), strict=True)
    ]
