"""The analysis of the protocol's second part: what the tuning chooses, and which hypotheses hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from scipy import stats

from experiments import second
from experiments.analysis import Method
from experiments.inference import holm, sign_flip_p_value
from experiments.protocol import LEVEL, MARGIN
from experiments.table import Result
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_differences


@dataclass(frozen=True)
class Candidate:
    """A configuration of a method, and its tuning runs.

    Attributes:
        method: The method's key in `second.METHODS`.
        changes: The settings of the configuration, as on the command line.
        runs: The tuning runs by learning rate.
        complete: Whether all runs of the protocol are there.
    """

    method: str
    changes: second.Changes
    runs: Mapping[float, Sequence[Result]]
    complete: bool

    @property
    def size(self) -> int:
        """The number of tuning runs."""
        return sum(map(len, self.runs.values()))

    @property
    def mean(self) -> float:
        """The mean final success over all rates and seeds together; NaN without runs."""
        finals = [run.success_after for runs in self.runs.values() for run in runs]
        return fmean(finals) if finals else float("nan")


def candidates(table: str, rows: Sequence[Result]) -> list[Candidate]:
    """All configurations of a regime with their tuning runs, in the order of the protocol.

    Args:
        table: The name of the regime's table.
        rows: The runs of that table.

    Raises:
        ValueError: If the protocol does not have the configuration of a run, or if the runs of a surrogate differ in
            another setting.
    """
    regime = second.REGIMES[table]
    found = []
    for (method, number), mine in _by_configuration(table, rows).items():
        tuning = [row for row in mine if row.phase == "tuning"]
        runs = {rate: [row for row in tuning if row.learning_rate == rate] for rate in regime.tuning_rates}
        complete = all({row.seed for row in runs[rate]} == set(second.TUNING_SEEDS) for rate in regime.tuning_rates)
        found.append(Candidate(method, second.METHODS[method].configurations[number], runs, complete))
    return found


def chosen(tried: Sequence[Candidate]) -> dict[str, Candidate]:
    """The best configuration of each method whose tuning is complete; of equal ones the first.

    Args:
        tried: All configurations, from `candidates`.

    Returns:
        The choices, by the methods' keys in `second.METHODS`.
    """
    found = {}
    for method in second.METHODS:
        mine = [candidate for candidate in tried if candidate.method == method]
        if all(candidate.complete for candidate in mine):
            found[method] = max(mine, key=lambda candidate: candidate.mean)
    return found


@dataclass(frozen=True)
class Contest:
    """The counted runs of a regime, each method in the configuration that its tuning chose.

    Attributes:
        regime: The regime, with its planned rates and seeds.
        methods: The methods' runs by their keys in `second.METHODS`, as far as there are any.
    """

    regime: second.Regime
    methods: Mapping[str, Method]

    @property
    def mark(self) -> str:
        """What follows the regime's name, or one of its numbers, while runs are missing."""
        return "" if self.complete else " (interim)"

    @property
    def title(self) -> str:
        """The regime's name, with the mark."""
        return self.regime.name + self.mark

    @property
    def size(self) -> int:
        """The number of runs."""
        return sum(method.size for method in self.methods.values())

    @property
    def planned(self) -> int:
        """The number of runs that the protocol wants."""
        return len(second.METHODS) * len(self.rates) * len(self.regime.seeds)

    @property
    def added_rates(self) -> set[float]:
        """The rates that the protocol adds, since a method is best at an end of the complete planned range."""
        planned = self.regime.rates
        if not self._has(planned):
            return set()
        best = {max(planned, key=method.means.__getitem__) for method in self.methods.values()}
        return {self.regime.added_rates[rate] for rate in best & self.regime.added_rates.keys()}

    @property
    def rates(self) -> list[float]:
        """All rates at which the protocol wants runs, in ascending order."""
        return sorted({*self.regime.rates, *self.added_rates})

    @property
    def complete(self) -> bool:
        """Whether all runs of the protocol are there."""
        return self._has(self.rates)

    @property
    def fast_rate(self) -> float | None:
        """The rate above the clip's best one, about three times it; None if there is none."""
        best = self.methods["clip"].best_rate
        return min((rate for rate in self.rates if rate > best), default=None)

    def finals(self, method: str, rate: float | None = None) -> Mapping[int, float]:
        """A method's final success by seed, at one rate or at its best one; empty without runs."""
        found = self.methods.get(method)
        return found.by_rate.get(rate or found.best_rate, {}) if found else {}

    def _has(self, rates: Sequence[float]) -> bool:
        seeds = set(self.regime.seeds)
        return self.methods.keys() == second.METHODS.keys() and all(
            method.runs.get(rate, {}).keys() >= seeds for method in self.methods.values() for rate in rates
        )


def contest(table: str, rows: Sequence[Result]) -> Contest:
    """The counted runs of a regime.

    Args:
        table: The name of the regime's table.
        rows: The runs of that table.

    Raises:
        ValueError: As `candidates`; or if a counted run has another configuration than the tuning chose, or a rate that
            the protocol adds only later.
    """
    best = chosen(candidates(table, rows))
    methods = {}
    for (key, number), every in _by_configuration(table, rows).items():
        method, mine = second.METHODS[key], [row for row in every if row.phase == "counted"]
        if mine and (key not in best or best[key].changes != method.configurations[number]):
            raise ValueError(
                f"{table}: a counted run of {mine[0].surrogate} with seed {mine[0].seed} has a configuration that the "
                "tuning did not choose"
            )
        runs: dict[float, dict[int, Result]] = {}
        for row in sorted(mine, key=lambda row: row.learning_rate):
            runs.setdefault(row.learning_rate, {})[row.seed] = row
        if mine:
            methods[key] = Method(method.surrogate, mine[0].settings, method.name, runs)
    found = Contest(second.REGIMES[table], methods)
    if unplanned := {rate for method in methods.values() for rate in method.runs} - set(found.rates):
        raise ValueError(
            f"{table}: counted runs at {min(unplanned):g}, which the protocol adds only when all runs at the planned "
            "rates are there and a method is best at that end"
        )
    return found


@dataclass(frozen=True)
class PairedTest:
    """The new method minus a rival in one regime, paired by seed.

    Attributes:
        table: The name of the regime's table.
        rival: The rival's key in `second.METHODS`.
        rates: The learning rates of the new method and of the rival.
        estimate: The mean difference.
        p_value: One-sided.
    """

    table: str
    rival: str
    rates: tuple[float, float]
    estimate: SeedMean
    p_value: float


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis of the second part with its tests, all of which must be significant.

    Attributes:
        name: Its name in `docs/study/study.md`.
        tests: Its tests; empty before all runs are there, or where there is no rate above the clip's best one.
        corrected: Its largest p-value after Holm's correction, for those that are corrected together.
    """

    name: str
    tests: Sequence[PairedTest]
    corrected: float | None = None

    @property
    def p_value(self) -> float | None:
        """The largest p-value of its tests; None without tests."""
        return max((test.p_value for test in self.tests), default=None)

    @property
    def holds(self) -> bool | None:
        """Whether it holds; None as long as that is open."""
        decisive = self.p_value if self.corrected is None else self.corrected
        return None if self.p_value is None or decisive is None else decisive < LEVEL


def hypotheses(contests: Mapping[str, Contest]) -> list[Hypothesis]:
    """H1 to H4 of `docs/study/study.md`.

    Args:
        contests: The counted runs of each regime, by the name of its table.
    """

    def tests(tables: Sequence[str], rivals: Sequence[str], *, fast: bool, margin: float = 0.0) -> list[PairedTest]:
        """One test for each regime and rival; none unless all can be made."""
        made = []
        for table in tables:
            found = contests[table]
            if not found.complete or (fast and found.fast_rate is None):
                return []
            for rival in rivals:
                made.append(_test(found, table, rival, found.fast_rate if fast else None, margin))
        return made

    first = Hypothesis("H1", tests(list(second.REGIMES), second.PENALTIES, fast=False, margin=MARGIN))
    others = [
        Hypothesis("H2", tests(second.FAST, second.PENALTIES, fast=True)),
        Hypothesis("H3", tests([second.OLD], ["clip", *second.PENALTIES], fast=False)),
        Hypothesis("H4", tests(second.FAST, ["troll"], fast=True)),
    ]
    # One that is still open counts with 1.
    corrected = holm([1.0 if one.p_value is None else one.p_value for one in others])
    return [first, *(replace(one, corrected=value) for one, value in zip(others, corrected, strict=True))]


def _test(found: Contest, table: str, rival: str, rate: float | None, margin: float) -> PairedTest:
    """With a margin, a t test that the difference is above −margin; else sign flips, that it is above 0."""
    rates = rate or found.methods[second.NEW].best_rate, rate or found.methods[rival].best_rate
    finals = found.finals(second.NEW, rate), found.finals(rival, rate)
    estimate, differences = paired_difference(*finals), seed_differences(*finals)
    assert estimate is not None  # a complete regime has all seeds
    if margin:
        p_value = float(stats.ttest_1samp(differences, -margin, alternative="greater").pvalue)
    else:
        p_value = sign_flip_p_value(differences, "greater")
    return PairedTest(table, rival, rates, estimate, p_value)


#: A method's key in `second.METHODS`, and the number of one of its configurations.
_Place = tuple[str, int]


def _by_configuration(table: str, rows: Sequence[Result]) -> dict[_Place, list[Result]]:
    """A regime's tuning and counted runs, in the order of the protocol."""
    found: dict[_Place, list[Result]] = {place: [] for place in _settings(table)}
    common: dict[str, dict[str, str]] = {}  # by surrogate, the settings that no configuration changes
    for row in rows:
        if row.phase == "exploratory":
            continue
        run, place = f"{table}: a {row.phase} run of {row.surrogate} with seed {row.seed}", _place(table, row)
        if place is None:
            raise ValueError(f"{run} has a configuration that the protocol does not know")
        others = {name: value for name, value in row.settings if name not in _settings(table)[place]}
        expected = common.setdefault(row.surrogate, others)
        if differing := sorted(others.items() ^ expected.items()):
            name = differing[0][0]
            raise ValueError(
                f"{run} has {name}={others.get(name, '')}, and another one {name}={expected.get(name, '')}, but no "
                "configuration of the protocol changes it"
            )
        found[place].append(row)
    return found


@cache
def _settings(table: str) -> dict[_Place, dict[str, str | None]]:
    """The settings by which the configurations of a regime are told apart, and those that all its runs change."""
    return {
        (key, number): {**second.settings_of(key, changes), **second.REGIMES[table].changes}
        for key, method in second.METHODS.items()
        for number, changes in enumerate(method.configurations)
    }


def _place(table: str, row: Result) -> _Place | None:
    """The configuration of a run; None if the protocol does not have it."""
    named = dict(row.settings)
    for place, settings in _settings(table).items():
        if (row.regime, row.surrogate) == (second.REGIMES[table].recipe, second.METHODS[place[0]].surrogate) and all(
            value_of(named.get(name)) == value_of(value) for name, value in settings.items()
        ):
            return place
    return None


def value_of(text: str | None) -> float | str | None:
    """A setting in a form that can be compared: a number may be written in several ways."""
    try:
        return text if text is None else float(text)
    except ValueError:
        return text
