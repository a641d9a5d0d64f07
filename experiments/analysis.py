"""The analysis of the tables of runs: methods at their own best rates, and TROLL against each rival.

Nothing is written here; the page and its figures show these classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments import contest
from experiments.inference import crossed_bootstrap_interval, holm, leave_one_out_choice, range_within
from experiments.protocol import (
    ADDED_RATES,
    BOUNDS,
    LEARNING_RATES,
    LEVEL,
    MARGIN,
    METHODS,
    REGIMES,
    SEEDS,
    TESTED,
    TUNING_RATES,
    TUNING_SEEDS,
)
from experiments.table import Result, Settings, read_questions
from troll_lab.evaluation.estimators import Interval
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_mean


@dataclass(frozen=True)
class Method:
    """The runs of one surrogate with one group of settings, at all rates and seeds.

    Attributes:
        surrogate: The value of `--surrogate`.
        settings: The settings other than the learning rate.
        label: The method's name on the page.
        runs: The runs by learning rate and then by seed.
    """

    surrogate: str
    settings: Settings
    label: str
    runs: Mapping[float, Mapping[int, Result]]

    @property
    def every_run(self) -> list[Result]:
        """All runs, in the order of rates and seeds."""
        return [run for runs in self.runs.values() for run in runs.values()]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.every_run)

    @property
    def by_rate(self) -> dict[float, dict[int, float]]:
        """Held-out success after training, by rate and seed."""
        return {rate: {seed: run.success_after for seed, run in runs.items()} for rate, runs in self.runs.items()}

    @property
    def mean(self) -> float:
        """Held-out success after training, over all runs."""
        return fmean(run.success_after for run in self.every_run)

    @property
    def means(self) -> dict[float, float]:
        """Held-out success after training, the mean over seeds, by rate."""
        return {rate: fmean(finals.values()) for rate, finals in self.by_rate.items()}

    @property
    def best_rate(self) -> float:
        """The rate of the best mean over all seeds; of equal ones, the lowest."""
        return max(sorted(self.means), key=self.means.__getitem__)

    @property
    def bound(self) -> float:
        """The bound of the method, which must have one."""
        return float(dict(self.settings)[BOUNDS[self.surrogate][0]])

    @property
    def range(self) -> Interval | None:
        """The rates within 90 % of the best mean; None if no run had a success."""
        return range_within(self.means) if any(self.means.values()) else None

    @property
    def decades(self) -> float:
        """The width of `range` in powers of ten."""
        return math.log10(self.range[1] / self.range[0]) if self.range else 0.0

    @cached_property
    def tuned(self) -> dict[int, Result]:
        """Each seed's run at the rate that is best for the other seeds."""
        return {seed: self.runs[rate][seed] for seed, rate in leave_one_out_choice(self.by_rate).items()}

    @property
    def finals(self) -> dict[int, float]:
        """Held-out success of the tuned runs, by seed."""
        return {seed: run.success_after for seed, run in self.tuned.items()}

    @property
    def success(self) -> SeedMean | None:
        """Held-out success at the chosen rates; None for fewer than two seeds."""
        return seed_mean(list(self.finals.values())) if self.tuned else None


@dataclass(frozen=True)
class Contrast(contest.Contrast[Method]):
    """One method, usually TROLL, minus a rival, paired by seed, each at its own rates.

    Attributes:
        bootstrap: The interval of the mean difference over seeds and questions; None if verdicts are missing.
    """

    bootstrap: Interval | None = None

    @property
    def p_values(self) -> tuple[float | None, ...]:
        """The p-values of the sign-flip test, the same by Holm, and of equivalence; None for what is not a test."""
        return (None,) * 3 if self.corrected is None else (self.p_value, self.corrected, self.equivalence)

    @property
    def verdict(self) -> str:
        """The outcome of the tests, in words."""
        differs = self.corrected is not None and self.corrected < LEVEL
        equivalent = self.equivalence is not None and self.equivalence < LEVEL
        order = "better" if self.estimate.mean > 0 else "worse"
        if differs:
            return f"{order}, by less than {100 * MARGIN:g} points" if equivalent else order
        return f"equivalent within {100 * MARGIN:g} points" if equivalent else "undecided"


@dataclass(frozen=True)
class Section:
    """The runs of one regime that are shown together.

    Attributes:
        regime: The name of the recipe.
        methods: The methods in the order of the page.
        tuning: The methods on the tuning seeds.
        contrasts: In a primary regime, TROLL minus each rival that shares two seeds.
    """

    regime: str
    methods: Sequence[Method]
    tuning: Sequence[Method]
    contrasts: Sequence[Contrast]

    @property
    def rates(self) -> list[float]:
        """All learning rates of the section."""
        return sorted({rate for method in self.methods for rate in method.runs})

    @property
    def seeds(self) -> int:
        """The number of seeds that all methods have at all their rates. With one seed, no rate can be chosen."""
        return len(set.intersection(*(set(method.tuned) for method in self.methods))) if self.methods else 0

    @property
    def every_run(self) -> list[Result]:
        """All runs of all methods but those of the tuning."""
        return [run for method in self.methods for run in method.every_run]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.every_run)

    @cached_property
    def chosen(self) -> dict[str, Method]:
        """The best method of each surrogate in a complete tuning; of equal ones, the one with the smaller bound."""
        found = {}
        for surrogate, (_, values) in BOUNDS.items():
            tried = {method.bound: method for method in self.tuning if method.surrogate == surrogate}
            if all(value in tried and tried[value].size == len(TUNING_RATES) * len(TUNING_SEEDS) for value in values):
                found[surrogate] = max((tried[value] for value in values), key=lambda method: method.mean)
        return found

    @property
    def added_rates(self) -> set[float]:
        """The rates that the protocol adds for all methods, since one is best at an end of the complete range."""
        if not self._has_all_runs_at(LEARNING_RATES):
            return set()
        best = {max(LEARNING_RATES, key=method.means.__getitem__) for method in self.methods}
        return {ADDED_RATES[rate] for rate in best & ADDED_RATES.keys()}

    @property
    def planned_rates(self) -> set[float]:
        """All rates that a primary regime must have."""
        return {*LEARNING_RATES, *self.added_rates}

    @property
    def interim(self) -> bool:
        """Whether these are counted runs, and some of the protocol's are missing."""
        counted = any(run.phase == "counted" for run in self.every_run)
        return counted and not self._has_all_runs_at(self.planned_rates)

    @property
    def mark(self) -> str:
        """What follows the regime's name, or one of its numbers, where it is interim."""
        return " (interim)" if self.interim else ""

    @property
    def title(self) -> str:
        """The regime's name with the mark, since a figure may be seen without the page."""
        return REGIMES.get(self.regime, self.regime) + self.mark

    def _has_all_runs_at(self, rates: Iterable[float]) -> bool:
        return {method.surrogate for method in self.methods} == METHODS.keys() and all(
            len(method.runs.get(rate, ())) >= SEEDS for rate in rates for method in self.methods
        )

    def method(self, surrogate: str) -> Method | None:
        """The first method of a surrogate."""
        return next((method for method in self.methods if method.surrogate == surrogate), None)

    @property
    def fast_rate(self) -> float | None:
        """The rate above the clip's best one, about three times it; None if it was not run."""
        clip = self.method("clip")
        faster = [rate for rate in self.rates if clip and rate > clip.best_rate]
        return min(faster, default=None)

    def finals(self, surrogate: str, rate: float | None = None) -> Mapping[int, float]:
        """A method's held-out success by seed, at one rate or at those that it chose; empty without runs."""
        method = self.method(surrogate)
        if method is None:
            return {}
        return method.finals if rate is None else method.by_rate.get(rate, {})

    def lead(self, surrogate: str) -> dict[int, float]:
        """A method's success minus the clip's at `fast_rate`, by seed."""
        if self.fast_rate is None:
            return {}
        first, second = self.finals(surrogate, self.fast_rate), self.finals("clip", self.fast_rate)
        return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}

    @property
    def hypotheses(self) -> tuple[bool, bool, bool, bool] | None:
        """Which of the first three hold, the third in its two halves, as "What decides" in `study.md` says.

        None before all runs are there.
        """
        troll, clip = self.method("troll"), self.method("clip")
        if troll is None or clip is None or self.interim:
            return None
        found = {contrast.second.surrogate: contrast for contrast in self.contrasts}
        equal = {name for name, one in found.items() if one.equivalence is not None and one.equivalence < LEVEL}
        penalty = "kl_penalty" in equal or found["kl_penalty"].verdict == "worse"
        faster = troll.decades > clip.decades and _above_zero(seed_mean(list(self.lead("troll").values())))
        return "clip" in equal, faster, "regression" in equal, penalty


def lead_shrinks(sections: Mapping[str, Section]) -> bool | None:
    """Whether the fourth hypothesis holds: replacing groups takes from TROLL's lead; None before all runs are there."""
    plain, resampled = sections["sparse-signal"], sections["sparse-signal-resampled"]
    if plain.hypotheses is None or resampled.hypotheses is None:
        return None
    return _above_zero(paired_difference(plain.lead("troll"), resampled.lead("troll")))


def primary_sections(tables: Mapping[str, Sequence[Result]], folder: Path) -> dict[str, Section]:
    """The primary regimes by name, as far as there are runs.

    Holm's correction is over the tests of all of them; a test without data yet counts with 1.

    Args:
        tables: The rows of each table, by its name.
        folder: The folder with the lists of questions.

    Raises:
        ValueError: If a method has counted runs with several settings, or with another bound than the tuning chose, or
            if the verdicts of a regime answer different questions.
    """
    rows = [row for table in tables.values() for row in table]
    found = {name: _primary(name, [row for row in rows if row.regime == name], folder) for name in REGIMES}
    tests = [(name, rival) for name in REGIMES for rival in TESTED]
    p_values = {(name, c.second.surrogate): c.p_value for name in found for c in found[name].contrasts}
    corrected = dict(zip(tests, holm([p_values.get(test, 1.0) for test in tests]), strict=True))
    return {name: _with_corrections(section, corrected) for name, section in found.items()}


def exploratory_sections(tables: Mapping[str, Sequence[Result]]) -> dict[str, list[Section]]:
    """The exploratory runs of each table, with one section for each regime, without contrasts.

    Counted runs of the regime at the same rates and seeds are shown with them.

    Args:
        tables: The rows of each table, by its name.
    """
    sections: dict[str, list[Section]] = {}
    counted = [row for rows in tables.values() for row in rows if row.phase == "counted"]
    for table, rows in tables.items():
        explored = [row for row in rows if row.phase == "exploratory"]
        for regime in dict.fromkeys(row.regime for row in explored):
            mine = {row.identity: row for row in explored if row.regime == regime}
            rates, seeds = {row.learning_rate for row in mine.values()}, {row.seed for row in mine.values()}
            others = {
                row.identity: row
                for row in counted
                if row.regime == regime and row.learning_rate in rates and row.seed in seeds
            }
            sections.setdefault(table, []).append(Section(regime, group(list((others | mine).values())), [], []))
    return sections


def group(rows: Sequence[Result]) -> list[Method]:
    """Groups runs by surrogate and settings, in the order of the page.

    Labels name the settings in which a method differs from the counted one of its surrogate; without one, those in
    which the methods of the surrogate differ.

    Raises:
        ValueError: If a run occurs twice.
    """
    runs: dict[tuple[str, Settings], dict[float, dict[int, Result]]] = {}
    for row in rows:
        seeds = runs.setdefault((row.surrogate, row.settings), {}).setdefault(row.learning_rate, {})
        if row.seed in seeds:
            rate = contest.rate_text(row.learning_rate)
            raise ValueError(f"{row.regime}: {row.surrogate} at {rate} with seed {row.seed} is in two tables")
        seeds[row.seed] = row
    counted = {(row.surrogate, row.settings) for row in rows if row.phase == "counted"}
    names = [*METHODS, *sorted({surrogate for surrogate, _ in runs} - METHODS.keys())]
    keys = sorted(runs, key=lambda key: (names.index(key[0]), key not in counted, key))
    return [Method(key[0], key[1], _label(key, keys, counted), dict(sorted(runs[key].items()))) for key in keys]


def _label(
    key: tuple[str, Settings], keys: Sequence[tuple[str, Settings]], counted: Collection[tuple[str, Settings]]
) -> str:
    surrogate, settings = key
    rivals = [dict(other) for name, other in keys if name == surrogate]
    plain = [dict(other) for name, other in counted if name == surrogate]
    compared = plain if len(plain) == 1 else rivals
    differing = [name for name, value in settings if any(other.get(name) != value for other in compared)]
    shown = [f"{name.rpartition('.')[2]}={dict(settings)[name]}" for name in differing]
    return " ".join([METHODS.get(surrogate, surrogate), *shown])


def _primary(regime: str, rows: Sequence[Result], folder: Path) -> Section:
    methods = group([row for row in rows if row.phase == "counted"])
    tuning = group([row for row in rows if row.phase == "tuning"])
    for method in methods:
        if method.label != METHODS.get(method.surrogate):
            raise ValueError(
                f"{regime}: counted runs of {method.surrogate} differ in their settings ({method.label}); "
                "collect those that only explore into another table, with --phase exploratory"
            )
    section = Section(regime, methods, tuning, [])
    if unplanned := set(section.rates) - section.planned_rates:
        raise ValueError(
            f"{regime}: counted runs at {', '.join(map(contest.rate_text, sorted(unplanned)))}, which the protocol "
            "adds only when all runs at the planned rates are there and a method is best at that end"
        )
    for method in methods:
        if (best := section.chosen.get(method.surrogate)) and best.bound != method.bound:
            raise ValueError(
                f"{regime}: the bound of {method.surrogate} is {method.bound:g} in the counted runs, but the tuning "
                f"runs chose {best.bound:g}"
            )
    base = section.method("troll")
    return replace(section, contrasts=_contrasts(base, methods, folder)) if base else section


def _contrasts(base: Method, methods: Sequence[Method], folder: Path) -> list[Contrast]:
    found = contest.contrasts_of([(base, method) for method in methods if method is not base], MARGIN)
    return [Contrast(**vars(one), bootstrap=_bootstrap(one.first, one.second, folder)) for one in found]


def _bootstrap(first: Method, second: Method, folder: Path) -> Interval | None:
    pairs = [(first.tuned[seed], second.tuned[seed]) for seed in sorted(first.tuned.keys() & second.tuned.keys())]
    names = {run.questions for pair in pairs for run in pair}
    if len(pairs) < 2 or "" in names:
        return None
    if len(names) > 1:
        raise ValueError(f"{pairs[0][0].regime}: runs answer different questions ({', '.join(sorted(names))})")
    differences = np.stack([one.successes.astype(int) - other.successes for one, other in pairs])
    return crossed_bootstrap_interval(differences, read_questions(folder, names.pop()))


def _above_zero(difference: SeedMean | None) -> bool:
    return difference is not None and difference.interval is not None and difference.interval[0] > 0


def _with_corrections(section: Section, corrected: Mapping[tuple[str, str], float]) -> Section:
    contrasts = [
        replace(contrast, corrected=corrected.get((section.regime, contrast.second.surrogate)))
        for contrast in section.contrasts
    ]
    return replace(section, contrasts=contrasts)
