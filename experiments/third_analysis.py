"""The analysis of the protocol's third part: whether the start matters under a KL target, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from scipy import stats

from experiments import second, second_analysis, third
from experiments.inference import equivalence_p_value, holm
from experiments.protocol import LEVEL, MARGIN, Phase
from experiments.second_analysis import value_of
from experiments.table import Result
from experiments.third import Arm
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_mean

Verdict = Literal["holds", "refuted", "open"]


@dataclass(frozen=True)
class Contest:
    """The counted runs of a regime.

    Attributes:
        table: The name of the regime's table.
        runs: The runs by arm and seed, with every arm of the protocol.
    """

    table: str
    runs: Mapping[Arm, Mapping[int, Result]]

    @property
    def regime(self) -> third.Regime:
        """The regime."""
        return third.REGIMES[self.table]

    @property
    def size(self) -> int:
        """The number of runs."""
        return sum(map(len, self.runs.values()))

    @property
    def planned(self) -> int:
        """The number of runs that the protocol wants."""
        return len(self.runs) * len(self.regime.seeds)

    @property
    def seeds(self) -> list[int]:
        """The seeds that have all their runs."""
        return sorted(set.intersection(*(set(runs) for runs in self.runs.values())))

    @property
    def complete(self) -> bool:
        """Whether all runs of the protocol are there."""
        return self.size == self.planned

    def at(self, method: str) -> list[Arm]:
        """A method's arms: from each start, the lowest first, and at its constant rate."""
        return [arm for arm in self.runs if arm.method == method]

    def finals(self, method: str) -> dict[int, float]:
        """A method's final success at its constant rate, by seed."""
        return self._finals(self.at(method)[-1])

    def targeted(self, method: str) -> dict[int, float]:
        """A method's final success with the target, the mean over starts, for each seed that has them all."""
        starts = [self.runs[arm] for arm in self.at(method)[:-1]]
        return {
            seed: fmean(runs[seed].success_after for runs in starts)
            for seed in sorted(set.intersection(*map(set, starts)))
        }

    def start_differences(self, methods: Iterable[str]) -> list[float]:
        """Success from the high start minus that from the low one, the mean over methods, for each complete seed."""
        return self._differences(methods, lambda starts, _: starts[-1] - starts[0])

    def control_differences(self, methods: Iterable[str]) -> list[float]:
        """Success with the target, the mean over starts, minus that at the constant rate; the mean over methods."""
        return self._differences(methods, lambda starts, constant: fmean(starts) - constant)

    def changes(self, method: str) -> list[SeedMean | None]:
        """Success with the target minus that at the constant rate, from each start, the lowest first."""
        constant = self.finals(method)
        return [paired_difference(self._finals(arm), constant) for arm in self.at(method)[:-1]]

    def _finals(self, arm: Arm) -> dict[int, float]:
        return {seed: run.success_after for seed, run in self.runs[arm].items()}

    def _differences(
        self, methods: Iterable[str], difference: Callable[[Sequence[float], float], float]
    ) -> list[float]:
        def of(method: str, seed: int) -> float:
            *starts, constant = (self.runs[arm][seed].success_after for arm in self.at(method))
            return difference(starts, constant)

        return [fmean(of(method, seed) for method in methods) for seed in self.seeds]


@dataclass(frozen=True)
class OtherSeeds:
    """The second part's counted runs of a regime, and the third part's of the same configurations on more seeds.

    Attributes:
        former: Those of the second part.
        added: Those of the third part.
    """

    former: second_analysis.Contest
    added: Contest

    @property
    def mark(self) -> str:
        """What follows one of its numbers while runs are missing."""
        return "" if self.former.complete and self.added.complete else " (interim)"

    def finals(self, method: str, rate: float | None = None) -> dict[int, float]:
        """A method's final success by seed, at its best rate.

        Raises:
            ValueError: If a rate is asked for: the third part has one for each method.
        """
        if rate is not None:
            raise ValueError(f"the runs on other seeds are those at the best rates; at {rate:g} there are none")
        return {**self.former.finals(method), **self.added.finals(method)}


def contest(table: str, rows: Sequence[Result]) -> Contest:
    """The counted runs of a regime.

    Args:
        table: The name of the regime's table.
        rows: The runs of that table.

    Raises:
        ValueError: If the protocol does not have a run.
    """
    return Contest(table, runs_of(table, rows, "counted"))


def runs_of(table: str, rows: Sequence[Result], phase: Phase) -> dict[Arm, dict[int, Result]]:
    """The runs of a table by arm and seed, with every arm of the protocol.

    Raises:
        ValueError: If the protocol does not have a run, or the runs of a seed are of several commits or machines.
    """
    name, seeds = third.TABLES[table]
    runs: dict[Arm, dict[int, Result]] = {arm: {} for arm in third.arms(table)}
    common: dict[tuple[str, bool], dict[str, str]] = {}  # the settings that the protocol does not change
    origins: dict[int, tuple[str, str, str]] = {}
    for row in rows:
        arm = next((arm for arm in runs if _is_of(row, third.REGIMES[name], arm)), None)
        if arm is None or row.phase != phase or row.seed not in seeds:
            raise ValueError(
                f"{table}: the protocol has no {row.phase} run of {row.surrogate} at {row.learning_rate:g} with seed "
                f"{row.seed} and these settings"
            )
        known = third.settings_of(third.REGIMES[name], arm)
        others = {field: value for field, value in row.settings if field not in known}
        if others != common.setdefault((arm.method, arm.target is None), others) or row.seed in runs[arm]:
            raise ValueError(
                f"{table}: two runs of {row.surrogate} at {row.learning_rate:g} with seed {row.seed}, or settings in "
                f"which the protocol's runs do not differ: {others}"
            )
        origin = (row.commit, row.machine, row.versions)
        if origins.setdefault(row.seed, origin) != origin or not row.commit or row.commit.endswith("+"):
            raise ValueError(
                f"{table}: the runs of seed {row.seed} are not of one commit on one machine, but of "
                f"{' '.join(origins[row.seed])} and {' '.join(origin)}: make the seed anew"
            )
        runs[arm][row.seed] = row
    return runs


def _is_of(row: Result, regime: third.Regime, arm: Arm) -> bool:
    named = dict(row.settings)
    return (row.regime, row.surrogate, row.learning_rate) == (
        regime.recipe,
        second.METHODS[arm.method].surrogate,
        arm.rate,
    ) and all(value_of(named.get(name)) == value_of(value) for name, value in third.settings_of(regime, arm).items())


@dataclass(frozen=True)
class Hypothesis:
    """One of K1 to K3 in one regime.

    Attributes:
        name: Its name in `docs/study/study.md`.
        table: The name of the regime's table.
        estimate: The mean difference over the complete seeds, pooled over methods; None for fewer than two.
        by_method: The same of each method, by its key in `second.METHODS`.
        p_value: That of the test that it holds; None before all runs are there.
        verdict: What follows.
    """

    name: str
    table: str
    estimate: SeedMean | None
    by_method: Mapping[str, SeedMean]
    p_value: float | None
    verdict: Verdict


def hypotheses(contests: Iterable[Contest]) -> list[Hypothesis]:
    """K1 and K2 of `docs/study/study.md` in each regime of the second part, and K3 in the others."""
    found = []
    for one in contests:
        if one.regime.former:
            found.append(_hypothesis("K1", one, one.start_differences, equal_within_margin))
        name = "K2" if one.regime.former else "K3"
        found.append(_hypothesis(name, one, one.control_differences, not_worse_than_margin))
    return found


def _hypothesis(
    name: str,
    found: Contest,
    differences: Callable[[Iterable[str]], list[float]],
    test: Callable[[Sequence[float], Sequence[Sequence[float]]], tuple[float, Verdict]],
) -> Hypothesis:
    pooled, single = differences(found.regime.methods), {each: differences([each]) for each in found.regime.methods}
    p_value: float | None = None
    verdict: Verdict = "open"
    if found.complete:
        p_value, verdict = test(pooled, list(single.values()))
    means = {method: mean for method, values in single.items() if (mean := _mean(values))}
    return Hypothesis(name, found.table, _mean(pooled), means, p_value, verdict)


def equal_within_margin(pooled: Sequence[float], single: Sequence[Sequence[float]]) -> tuple[float, Verdict]:
    """K1: two one-sided t tests at ±5 points; refuted if one t test shows that it is beyond one of the two.

    Args:
        pooled: The difference of each seed, over all methods.
        single: Not used: single methods have too few seeds.

    Returns:
        The p-value, and the verdict.
    """
    p_value = equivalence_p_value(pooled, MARGIN)
    assert p_value is not None  # a complete regime has seeds
    beyond = min(_above(pooled, MARGIN), _above([-value for value in pooled], MARGIN))
    return p_value, "holds" if p_value < LEVEL else "refuted" if beyond < LEVEL else "open"


def not_worse_than_margin(pooled: Sequence[float], single: Sequence[Sequence[float]]) -> tuple[float, Verdict]:
    """K2 and K3: a one-sided t test that the difference is above −5 points, and no method's mean is below it.

    It is refuted if a t test shows that the difference is below, or with Holm's correction that of a method.

    Args:
        pooled: The difference of each seed, over all methods.
        single: The differences of each method.

    Returns:
        The p-value, and the verdict.
    """
    p_value = _above(pooled, -MARGIN)
    below = [_above([-value for value in values], MARGIN) for values in (pooled, *single)]
    if p_value < LEVEL and min(map(fmean, single)) >= -MARGIN:
        return p_value, "holds"
    return p_value, "refuted" if min(below[0], *holm(below[1:])) < LEVEL else "open"


def overall(name: str, found: Iterable[Hypothesis]) -> Verdict:
    """The verdict on a hypothesis: it holds if it does in each regime that decides, and is refuted if it is in one."""
    verdicts = {each.verdict for each in found if each.name == name and third.REGIMES[each.table].gates}
    return "refuted" if "refuted" in verdicts else "holds" if verdicts == {"holds"} else "open"


@dataclass(frozen=True)
class Dial:
    """What one method makes of a setting that is too low or too high.

    Attributes:
        method: The method's key in `second.METHODS`.
        setting: `kl_target`, or `learning_rate` without it.
        successes: The success of each seed by the value of the setting, in its order; for seeds that have all values.
    """

    method: str
    setting: str
    successes: Mapping[float, Sequence[float]]

    @property
    def best(self) -> float | None:
        """The value with the highest mean; None without runs."""
        means = {value: fmean(each) for value, each in self.successes.items() if each}
        return max(means, key=means.__getitem__) if means else None


def dials(regime: Contest, rows: Sequence[Result]) -> list[Dial]:
    """K4 of `docs/study/study.md`: success over the target, and over the constant rate, for each method.

    Args:
        regime: The runs of the regime, which have the values in the middle.
        rows: The runs with the other values.

    Raises:
        ValueError: If the protocol does not have a run.
    """
    runs, found = runs_of(third.DIAL, rows, "exploratory"), []
    for method in regime.regime.methods:
        *_, middle, constant = regime.at(method)
        others = [arm for arm in runs if arm.method == method]
        of_target = [middle, *(arm for arm in others if arm.target is not None)]
        of_rate = [constant, *(arm for arm in others if arm.target is None)]
        for setting, arms in (("kl_target", of_target), ("learning_rate", of_rate)):
            by_value = {arm.target or arm.rate: {**regime.runs, **runs}[arm] for arm in arms}
            seeds = sorted(set.intersection(*map(set, by_value.values())))
            values = {value: [by_value[value][seed].success_after for seed in seeds] for value in sorted(by_value)}
            found.append(Dial(method, setting, values))
    return found


def rivals(regime: Contest, rows: Sequence[Result]) -> dict[Arm, dict[int, float]]:
    """The success of another rule for the rate, by the arm with our rule and the seed.

    Args:
        regime: The runs with our rule.
        rows: Those with the other rule, by a plugin.

    Raises:
        ValueError: If a run has no counterpart.
    """
    found: dict[Arm, dict[int, float]] = {arm: {} for arm in regime.runs if arm.target is not None}
    for row in rows:
        ours = replace(row, settings=tuple(each for each in row.settings if each[0] != "plugins"))
        arm = next((arm for arm in found if _is_of(ours, regime.regime, arm)), None)
        if arm is None:
            raise ValueError(f"no run of {regime.table} is as that of {row.surrogate} at {row.learning_rate:g}")
        found[arm][row.seed] = row.success_after
    return found


def _above(differences: Sequence[float], bound: float) -> float:
    """The p-value of the one-sided t test that the mean is above a bound."""
    return float(stats.ttest_1samp(differences, bound, alternative="greater").pvalue)


def _mean(values: Sequence[float]) -> SeedMean | None:
    return seed_mean(values) if len(values) > 1 else None
