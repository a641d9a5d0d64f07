"""What the tables of runs say: methods at their own best rates, and TROLL against each rival.

Nothing here writes; the page and its figures show what these classes hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.study.protocol import (
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
from benchmarks.study.table import Result, read_questions
from troll.evaluation.estimators import Interval
from troll.study.contest import rate_text
from troll.study.statistics import (
    Estimate,
    crossed_bootstrap_interval,
    equivalence_p_value,
    holm,
    leave_one_out_choice,
    paired_difference,
    range_within,
    seed_differences,
    sign_flip_p_value,
    success_estimate,
)

Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Method:
    """The runs of one surrogate with one group of settings, at all rates and seeds.

    Attributes:
        surrogate: Its name on `--surrogate`.
        settings: Besides the learning rate.
        label: On the page.
        runs: Rate to seed to run.
    """

    surrogate: str
    settings: Settings
    label: str
    runs: Mapping[float, Mapping[int, Result]]

    @property
    def every_run(self) -> list[Result]:
        """Its runs, by rate and seed."""
        return [run for runs in self.runs.values() for run in runs.values()]

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.every_run)

    @property
    def finals(self) -> dict[float, dict[int, float]]:
        """Held-out success after training, by rate and seed."""
        return {rate: {seed: run.success_after for seed, run in runs.items()} for rate, runs in self.runs.items()}

    @property
    def mean(self) -> float:
        """Held-out success after training, over all runs."""
        return fmean(run.success_after for run in self.every_run)

    @property
    def means(self) -> dict[float, float]:
        """Its mean over seeds, by rate."""
        return {rate: fmean(finals.values()) for rate, finals in self.finals.items()}

    @property
    def bound(self) -> float:
        """Its bound, of a method that has one."""
        return float(dict(self.settings)[BOUNDS[self.surrogate][0]])

    @cached_property
    def tuned(self) -> dict[int, Result]:
        """Each seed's run at the rate that is best for the other seeds."""
        return {seed: self.runs[rate][seed] for seed, rate in leave_one_out_choice(self.finals).items()}

    @property
    def tuned_finals(self) -> dict[int, float]:
        """Held-out success of these, by seed."""
        return {seed: run.success_after for seed, run in self.tuned.items()}

    @property
    def success(self) -> Estimate | None:
        """Held-out success at the chosen rates; None for fewer than two seeds."""
        return success_estimate(list(self.tuned_finals.values()), None) if self.tuned else None

    @property
    def usable_rates(self) -> tuple[float, float]:
        """The range of rates with at least 90 % of the best rate's success."""
        return range_within(self.means)


@dataclass(frozen=True)
class Contrast:
    """One method minus another, paired by seed, each at its own rates.

    Attributes:
        first: Mostly TROLL.
        second: The rival.
        estimate: The mean difference of success with its t interval.
        bootstrap: Its interval over seeds and questions; None where verdicts are missing.
        p_value: Of the sign-flip test.
        equivalence: The p-value against a difference of the margin or more.
        corrected: The sign-flip test's p-value by Holm; None where it is not one of the tests.
    """

    first: Method
    second: Method
    estimate: Estimate
    bootstrap: Interval | None
    p_value: float
    equivalence: float | None
    corrected: float | None = None

    @property
    def p_values(self) -> tuple[float | None, ...]:
        """Of the sign-flip test, the same by Holm, and of equivalence; None where it is not one of the tests."""
        return (None,) * 3 if self.corrected is None else (self.p_value, self.corrected, self.equivalence)

    @property
    def verdict(self) -> str:
        """What the tests say, in words."""
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
        regime: The recipe.
        methods: In the order of the page.
        tuning: Those of the tuning seeds.
        contrasts: TROLL minus each rival; all of primary regimes with two seeds, and of others where a base was named.
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
        """How many seeds all methods have at all of their rates; a method with one seed has no rate chosen for it."""
        return len(set.intersection(*(set(method.tuned) for method in self.methods))) if self.methods else 0

    @property
    def size(self) -> int:
        """The number of runs."""
        return sum(method.size for method in self.methods)

    @cached_property
    def chosen(self) -> dict[str, Method]:
        """The best method of each surrogate in tuning, if that is complete; of equal ones that of the smaller bound."""
        found = {}
        for surrogate, (_, values) in BOUNDS.items():
            tried = {method.bound: method for method in self.tuning if method.surrogate == surrogate}
            if all(value in tried and tried[value].size == len(TUNING_RATES) * len(TUNING_SEEDS) for value in values):
                found[surrogate] = max((tried[value] for value in values), key=lambda method: method.mean)
        return found

    @property
    def added_rates(self) -> set[float]:
        """What the protocol adds for all methods, because one with all of its runs is best at an end of the range."""
        full = [m for m in self.methods if all(len(m.runs.get(rate, ())) >= SEEDS for rate in LEARNING_RATES)]
        best = {max(LEARNING_RATES, key=method.means.__getitem__) for method in full}
        return {ADDED_RATES[rate] for rate in best & ADDED_RATES.keys()}

    @property
    def planned_rates(self) -> set[float]:
        """All rates that a primary regime is to have."""
        return {*LEARNING_RATES, *self.rates, *self.added_rates}

    @property
    def interim(self) -> bool:
        """Whether these are counted runs, and some of the protocol's are missing."""
        counted = any(run.phase == "counted" for method in self.methods for run in method.every_run)
        return counted and not (
            {method.surrogate for method in self.methods} == METHODS.keys()
            and all(len(method.runs.get(rate, ())) >= SEEDS for method in self.methods for rate in self.planned_rates)
        )

    def method(self, surrogate: str) -> Method | None:
        """The first method of a surrogate."""
        return next((method for method in self.methods if method.surrogate == surrogate), None)

    @property
    def fast_rate(self) -> float | None:
        """The rate above the clip's best one, about three times it; None if it was not run."""
        clip = self.method("clip")
        faster = [rate for rate in self.rates if clip and rate > max(clip.means, key=clip.means.__getitem__)]
        return min(faster, default=None)


def primary_sections(tables: Mapping[str, Sequence[Result]], folder: Path) -> dict[str, Section]:
    """The primary regimes by name, with what there is of each.

    Holm's correction is over the tests of all of them; a test without data yet counts with 1.

    Args:
        tables: Rows by the name of their table.
        folder: Of the lists of questions.

    Raises:
        ValueError: A method has counted runs with several settings or with another bound than the tuning chose, or the
            verdicts of a regime answer different questions.
    """
    rows = [row for table in tables.values() for row in table]
    found = {name: _primary(name, [row for row in rows if row.regime == name], folder) for name in REGIMES}
    tests = [(name, rival) for name in REGIMES for rival in TESTED]
    p_values = {(name, c.second.surrogate): c.p_value for name in found for c in found[name].contrasts}
    corrected = dict(zip(tests, holm([p_values.get(test, 1.0) for test in tests]), strict=True))
    return {name: _with_corrections(section, corrected) for name, section in found.items()}


def exploratory_sections(
    tables: Mapping[str, Sequence[Result]], folder: Path, bases: Mapping[str, str]
) -> dict[str, list[Section]]:
    """The exploratory runs of each table, a section for each regime.

    Args:
        tables: Rows by the name of their table.
        folder: Of the lists of questions.
        bases: For some tables, the label of the method that the others are subtracted from. The default is "TROLL".
    """
    sections: dict[str, list[Section]] = {}
    for table, rows in tables.items():
        explored = [row for row in rows if row.phase == "exploratory"]
        for regime in dict.fromkeys(row.regime for row in explored):
            methods = group([row for row in explored if row.regime == regime])
            base = next((method for method in methods if method.label == bases.get(table, "TROLL")), None)
            contrasts = _contrasts(base, methods, folder) if base else []
            sections.setdefault(table, []).append(Section(regime, methods, [], contrasts))
    return sections


def group(rows: Sequence[Result]) -> list[Method]:
    """Runs by surrogate and settings, in the order of the page; labels say what differs within a surrogate.

    Raises:
        ValueError: A run is there twice.
    """
    runs: dict[tuple[str, Settings], dict[float, dict[int, Result]]] = {}
    for row in rows:
        seeds = runs.setdefault((row.surrogate, row.settings), {}).setdefault(row.learning_rate, {})
        if row.seed in seeds:
            rate = rate_text(row.learning_rate)
            raise ValueError(f"{row.regime}: {row.surrogate} at {rate} with seed {row.seed} is in two tables")
        seeds[row.seed] = row
    order = list(METHODS)
    keys = sorted(runs, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))
    return [Method(key[0], key[1], _label(key, keys), dict(sorted(runs[key].items()))) for key in keys]


def _label(key: tuple[str, Settings], keys: Sequence[tuple[str, Settings]]) -> str:
    surrogate, settings = key
    rivals = [dict(other) for name, other in keys if name == surrogate]
    differing = [name for name, value in settings if any(other.get(name) != value for other in rivals)]
    shown = [f"{name}={dict(settings)[name]}" for name in differing]
    return " ".join([METHODS.get(surrogate, surrogate), *shown])


def _primary(regime: str, rows: Sequence[Result], folder: Path) -> Section:
    methods = group([row for row in rows if row.phase == "counted"])
    tuning = group([row for row in rows if row.phase == "tuning"])
    for method in methods:
        if method.label != METHODS.get(method.surrogate):
            raise ValueError(
                f"{regime}: counted runs of {method.surrogate} differ in their settings ({method.label}); "
                "collect those that only explore with --exploratory, into another table"
            )
    section = Section(regime, methods, tuning, [])
    for method in methods:
        if (best := section.chosen.get(method.surrogate)) and best.bound != method.bound:
            raise ValueError(
                f"{regime}: the bound of {method.surrogate} is {method.bound:g} in the counted runs, but the tuning "
                f"runs chose {best.bound:g}"
            )
    base = section.method("troll")
    return replace(section, contrasts=_contrasts(base, methods, folder)) if base else section


def _contrasts(base: Method, methods: Sequence[Method], folder: Path) -> list[Contrast]:
    found = [_contrast(base, method, folder) for method in methods if method is not base]
    return [contrast for contrast in found if contrast is not None]


def _contrast(first: Method, second: Method, folder: Path) -> Contrast | None:
    estimate = paired_difference(first.tuned_finals, second.tuned_finals)
    if estimate is None:
        return None
    differences = seed_differences(first.tuned_finals, second.tuned_finals)
    return Contrast(
        first,
        second,
        estimate,
        bootstrap=_bootstrap(first, second, folder),
        p_value=sign_flip_p_value(differences),
        equivalence=equivalence_p_value(differences, MARGIN),
    )


def _bootstrap(first: Method, second: Method, folder: Path) -> Interval | None:
    pairs = [(first.tuned[seed], second.tuned[seed]) for seed in _common(first, second)]
    names = {run.questions for pair in pairs for run in pair}
    if len(pairs) < 2 or "" in names:
        return None
    if len(names) > 1:
        raise ValueError(f"{pairs[0][0].regime}: runs answer different questions ({', '.join(sorted(names))})")
    differences = np.stack([one.right.astype(int) - other.right for one, other in pairs])
    return crossed_bootstrap_interval(differences, read_questions(folder, names.pop()))


def _common(first: Method, second: Method) -> list[int]:
    return sorted(first.tuned.keys() & second.tuned.keys())


def _with_corrections(section: Section, corrected: Mapping[tuple[str, str], float]) -> Section:
    contrasts = [
        replace(contrast, corrected=corrected.get((section.regime, contrast.second.surrogate)))
        for contrast in section.contrasts
    ]
    return replace(section, contrasts=contrasts)
