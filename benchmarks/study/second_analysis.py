"""The analysis of the protocol's second part: which configuration of each method its tuning runs choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.study import second
from benchmarks.study.collect import identity_of
from benchmarks.study.table import Result


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
        rows: Its rows.
    """
    rates = second.REGIMES[table].tuning_rates
    tuning = [row for row in rows if row.phase == "tuning"]
    found = []
    for method, changes in second.configurations():
        regime, surrogate, _, settings, _ = identity_of(second.plan(table, method, changes, rates[:1], seed=0)[0])
        mine = [row for row in tuning if (row.regime, row.surrogate, row.settings) == (regime, surrogate, settings)]
        runs = {rate: [row for row in mine if row.learning_rate == rate] for rate in rates}
        complete = all({row.seed for row in runs[rate]} == set(second.TUNING_SEEDS) for rate in rates)
        found.append(Candidate(method, changes, runs, complete))
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
