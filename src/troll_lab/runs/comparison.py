"""Comparisons of runs: groups of runs that differ only in their seed, and the differences between groups.

This module needs neither the trainer nor the recipes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from troll.files import read_json
from troll_lab.runs.recorded import (
    DEFAULT_SURROGATE,
    MANIFEST,
    Measure,
    Run,
    eval_questions,
    is_comparison,
    number,
    read_runs,
)
from troll_lab.runs.statistics import SeedMean, paired_difference, seed_mean

# Settings that do not distinguish methods.
_OF_THE_FOLDER = {"output_dir", "resume_from_checkpoint"}
_NO_AXIS = _OF_THE_FOLDER | {"seed", "surrogate"}

#: The text for the value of a setting that a run does not record, while another run of its recipe does.
_DEFAULT = "default"

Row = tuple[tuple[str, str], ...]  # the recipe, then (field, value) of each other difference of runs, without the seed


class Compared(Protocol):
    """Results that can be compared seed by seed."""

    @property
    def finals(self) -> dict[int, float]:
        """The final result of each seed."""


@dataclass(frozen=True)
class Method(ABC):
    """A method with its results.

    Attributes:
        row: The recipe and the settings that distinguish it from others with its surrogate: its row of the table.
        surrogate: The surrogate, which is its column of the table.
        measure: The measure of its results.
    """

    row: Row
    surrogate: str
    measure: Measure

    @property
    def label(self) -> str:
        """The method in words."""
        return " ".join(filter(None, [row_label(self.row), self.surrogate]))

    @property
    @abstractmethod
    def finals(self) -> dict[int, float]:
        """The measure after training by seed, of the seeds that have it."""

    @property
    @abstractmethod
    def final(self) -> SeedMean | None:
        """The mean of the final results over seeds; None if there are none."""


@dataclass(frozen=True)
class Group(Method):
    """The finished runs of a method, which differ only in their seed.

    Attributes:
        runs: The runs in the order of their seeds, at least one.
        planned: The number of runs with the unfinished ones.
    """

    runs: Sequence[Run]
    planned: int

    @property
    def finals(self) -> dict[int, float]:
        """The measure after training by seed, of the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.final(self.measure)) is not None}

    @property
    def final(self) -> SeedMean | None:
        """The mean of the final measure over seeds; None if no run has it."""
        answers = eval_questions(self.runs[0].summary) if self.measure == "success" else None
        return seed_mean(list(self.finals.values()), answers) if self.finals else None

    def mean(self, key: str) -> float | None:
        """The mean of a figure of the summary over the runs that have it."""
        values = [value for run in self.runs if (value := number(run.summary.get(key))) is not None]
        return fmean(values) if values else None


C = TypeVar("C", bound=Compared)
M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Difference(Generic[C]):
    """The mean difference of two methods' final results, first − second, over their common seeds."""

    first: C
    second: C
    estimate: SeedMean


@dataclass(frozen=True)
class Comparison:
    """Several runs, including unfinished ones, and the commands that made them, if known."""

    runs: Sequence[Run]
    commands: Sequence[str] = ()

    @cached_property
    def finished(self) -> list[Run]:
        """The finished runs."""
        return [run for run in self.runs if run.finished]

    @cached_property
    def measure(self) -> Measure:
        """The measure by which the runs are compared."""
        return measure_of(self.finished)

    @cached_property
    def common_settings(self) -> dict[str, Any]:
        """The settings that all finished runs share, except for their folder."""
        first, *others = [dict(run.settings) for run in self.finished] or [{}]
        return {
            name: value
            for name, value in first.items()
            if name not in _OF_THE_FOLDER and all(name in other and other[name] == value for other in others)
        }

    @cached_property
    def groups(self) -> list[Group]:
        """The finished runs by everything but their seed, in the order of the runs.

        Raises:
            ValueError: If two runs do not differ, not even in their seed.
        """
        members: dict[tuple[Row, str], dict[int, Run]] = {}
        for run, row in zip(self.finished, _rows(self.finished), strict=True):
            runs = members.setdefault((row, run.surrogate), {})
            if run.seed in runs:
                raise ValueError(f"{runs[run.seed].name} and {run.name} do not differ: leave one of them out")
            runs[run.seed] = run
        left_out = [run for run in self.runs if not run.finished]
        return [
            Group(
                *(row, surrogate, self.measure),
                runs=[runs[seed] for seed in sorted(runs)],
                planned=len(runs) + sum(_belongs(run, row, next(iter(runs.values()))) for run in left_out),
            )
            for (row, surrogate), runs in members.items()
        ]

    @cached_property
    def surrogates(self) -> list[str]:
        """The table's columns."""
        return list(dict.fromkeys(group.surrogate for group in self.groups))

    @cached_property
    def table(self) -> dict[Row, dict[str, Group]]:
        """The groups by row and column."""
        return table_of(self.groups)

    @cached_property
    def differences(self) -> list[Difference[Group]]:
        """TROLL's groups (or the first surrogate's) minus each other's; with one surrogate, each group minus the first.

        Two groups are compared if they agree on the settings that both read, and have a common seed.
        """
        several = len(self.surrogates) > 1
        pairs = rivals(self.groups) if several else [(group, self.groups[0]) for group in self.groups[1:]]
        estimates = [(one, other, paired_difference(one.finals, other.finals)) for one, other in pairs]
        return [Difference(first, second, found) for first, second, found in estimates if found is not None]


def measure_of(runs: Sequence[Run]) -> Measure:
    """The measure by which finished runs can be compared."""
    finals, rewards = [run.final("success") for run in runs], [run.final("reward") for run in runs]
    return "reward" if set(finals) == {None} and set(rewards) != {None} else "success"


def row_label(row: Row) -> str:
    """A row in words: the recipe, and the settings as `field=value`."""
    return " ".join(value if name == "recipe" else f"{name}={value}" for name, value in row)


def table_of(methods: Sequence[M]) -> dict[Row, dict[str, M]]:
    """The methods by row and surrogate.

    A method that does not use all settings of a row belongs to several rows, unless another method with its surrogate
    uses more of them. A row whose settings are all part of another row's is merged into that row.
    """
    rows = dict.fromkeys(method.row for method in methods)
    table: dict[Row, dict[str, M]] = {row: {} for row in rows if not any(set(row) < set(other) for other in rows)}
    for method in sorted(methods, key=lambda method: len(method.row), reverse=True):
        for row, cells in table.items():
            if set(method.row) <= set(row):
                cells.setdefault(method.surrogate, method)
    return table


def panels(methods: Sequence[M]) -> list[tuple[str, dict[str, M]]]:
    """The methods that share a plot, by name: the surrogates of a row; with a single surrogate, the rows."""
    surrogates = list(dict.fromkeys(method.surrogate for method in methods))
    if len(surrogates) == 1:
        return [(surrogates[0], {row_label(method.row): method for method in methods})]
    return [
        (row_label(row), {name: cells[name] for name in surrogates if name in cells})
        for row, cells in table_of(methods).items()
    ]


def rivals(methods: Sequence[M]) -> list[tuple[M, M]]:
    """TROLL's methods, or else the first surrogate's, each with every other surrogate's that it can be compared to.

    Two methods can be compared if they agree on the settings that both read.
    """
    surrogates = [method.surrogate for method in methods]
    base = DEFAULT_SURROGATE if DEFAULT_SURROGATE in surrogates else next(iter(surrogates), "")
    return [
        (one, other)
        for one in methods
        for other in methods
        if one.surrogate == base != other.surrogate and _agree(one.row, other.row)
    ]


def _agree(first: Row, second: Row) -> bool:
    """Whether two rows have the same values of the settings that both contain."""
    values = dict(second)
    return all(values.get(name, value) == value for name, value in first)


def read_comparison(paths: Sequence[Path]) -> Comparison:
    """Reads run folders and comparison folders.

    Raises:
        FileNotFoundError: If a folder is neither, or none has a run.
        ValueError: If a file is malformed.
    """
    manifests = [read_json(path / MANIFEST) for path in paths if is_comparison(path)]
    commands = [manifest.get("command") for manifest in manifests]
    return Comparison(read_runs(paths), [command for command in commands if isinstance(command, str)])


def _belongs(run: Run, row: Row, member: Run) -> bool:
    """Whether an unfinished run would belong to the group of a finished one: also by settings that no row shows yet."""
    (_, recipe), *settings = row
    both = run.settings.keys() & member.settings.keys() - _NO_AXIS - member.settled
    return (
        run.surrogate == member.surrogate
        and run.recipe == recipe
        and all(run.settings[name] == member.settings[name] for name in both)
        and all(
            _text(run.settings[name]) == value if name in run.settings else value in (_DEFAULT, "null")
            for name, value in settings
        )
    )


def _rows(runs: Sequence[Run]) -> list[Row]:
    """The row of each run: its recipe, and the settings in which runs differ, without the surrogate and the seed.

    A setting in which runs of one recipe differ counts for runs whose surrogate reads it, or may read it.
    """
    by_some: set[str] = set().union(*(run.settings_read or () for run in runs))
    own: list[dict[str, str]] = []
    no_axes: list[set[str]] = []
    named: dict[str, dict[str, None]] = {}  # the settings that some run of a recipe records
    for run in runs:
        unread = set() if run.settings_read is None else by_some - run.settings_read
        unread |= set(run.summary.get("surrogate_sets", ()))  # the recipe's value was replaced
        unread |= run.settled  # each method has its own value
        # A run's configuration leaves out what is None, which another run may have set.
        settings = {**(run.summary.get("surrogate_settings") or {}), **run.settings}
        no_axes.append(_NO_AXIS | unread)
        own.append({name: _text(value) for name, value in settings.items() if name not in no_axes[-1]})
        named.setdefault(run.recipe, {}).update(dict.fromkeys(own[-1]))
    for run, settings, left_out in zip(runs, own, no_axes, strict=True):
        settings |= dict.fromkeys(named[run.recipe].keys() - settings.keys() - left_out, _DEFAULT)
    values: dict[tuple[str, str], set[str]] = {}
    for run, settings in zip(runs, own, strict=True):
        for name, value in settings.items():
            values.setdefault((run.recipe, name), set()).add(value)
    axes = {name for (_, name), seen in values.items() if len(seen) > 1}
    return [
        (("recipe", run.recipe), *((x, settings[x]) for x in named[run.recipe] if x in axes & settings.keys()))
        for run, settings in zip(runs, own, strict=True)
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
