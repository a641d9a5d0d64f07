"""What several runs say together: groups of runs that differ only in their seed, and the differences between them.

Reads nothing but the runs' folders, so that it needs neither the trainer nor the recipes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from troll.run_folder import is_finished, read_json, read_metrics, read_settings
from troll.study.curves import SHARE, number
from troll.study.statistics import Estimate, paired_difference, success_estimate

#: The file that makes a folder a comparison: the settings and the recipes of its runs by name, and its command.
MANIFEST = "compare.json"

#: What runs are compared by: the share of held-out problems solved; the mean held-out reward, where no run measured it.
Measure = Literal["success", "reward"]

_SURROGATE, DEFAULT_SURROGATE = "surrogate", "troll"
# What a setting of this name differs in is not the method.
_OF_THE_FOLDER = {"output_dir", "resume_from_checkpoint"}
_NO_AXIS = _OF_THE_FOLDER | {"seed", _SURROGATE}

Row = tuple[tuple[str, str], ...]  # the recipe, then (field, value) of what else the runs differ in, without the seed


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it.

    Attributes:
        name: The folder's.
        settings: ``config.yaml``; before the run has started, what the comparison's manifest says of it.
        summary: ``summary.json``, empty if the run did not come to write it.
        rows: ``metrics.jsonl``.
        planned_recipe: The recipe by the manifest, for runs without a summary.
        folder: Where it is.
        tuning: Whether it only served to choose settings.
        settled: The settings that were chosen for its method, and so belong to the method.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    planned_recipe: str | None
    folder: Path
    tuning: bool = False
    settled: frozenset[str] = frozenset()

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.summary.get("recipe") or self.planned_recipe or self.name)

    @property
    def surrogate(self) -> str:
        """What kept the updates near the old policy."""
        return str(self.summary.get(_SURROGATE) or self.settings.get(_SURROGATE) or DEFAULT_SURROGATE)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.settings.get("seed", self.summary.get("seed", 0)))

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return is_finished(self.summary)

    @property
    def status(self) -> str:
        """Of a run that is not finished, in words."""
        started = (self.folder / "config.yaml").is_file()
        return str(self.summary.get("status") or ("unfinished" if started else "not started"))

    @property
    def settings_read(self) -> set[str] | None:
        """The settings that its surrogate reads and not all do; None if the run does not say: it may read any."""
        names = self.summary.get("surrogate_settings")
        return None if names is None else set(names)

    def final(self, measure: Measure) -> float | None:
        """The held-out success or reward after training."""
        return number(self.summary.get(f"{measure}_after"), SHARE if measure == "success" else (-math.inf, math.inf))


@dataclass(frozen=True)
class Group:
    """The finished runs that differ only in their seed.

    Attributes:
        row: What sets them apart from other groups of their surrogate.
        surrogate: Theirs.
        runs: At least one, by seed.
        planned: How many there are with those that did not finish.
        measure: What they are compared by.
    """

    row: Row
    surrogate: str
    runs: Sequence[Run]
    planned: int
    measure: Measure

    @property
    def label(self) -> str:
        """The group in words."""
        return " ".join(filter(None, [row_label(self.row), self.surrogate]))

    @property
    def finals(self) -> dict[int, float]:
        """The measure after training by seed, of the runs that have it."""
        return {run.seed: value for run in self.runs if (value := run.final(self.measure)) is not None}

    @property
    def final(self) -> Estimate | None:
        """Its mean over seeds."""
        values = list(self.finals.values())
        size = number(self.runs[0].summary.get("eval_size"), (1, math.inf)) if self.measure == "success" else None
        return success_estimate(values, None if size is None else int(size)) if values else None

    def mean(self, key: str) -> float | None:
        """The mean of a figure of the summary over the runs that have it."""
        values = [value for run in self.runs if (value := number(run.summary.get(key))) is not None]
        return fmean(values) if values else None


@dataclass(frozen=True)
class Difference:
    """How much better one group is than another, seed by seed."""

    first: Group
    second: Group
    estimate: Estimate


@dataclass(frozen=True)
class Comparison:
    """Several runs, ordered.

    Attributes:
        runs: All of them, the unfinished ones too.
        commands: With which they were made, as far as that is known.
        choices: What tunings chose, as the manifests have it.
    """

    runs: Sequence[Run]
    commands: Sequence[str] = ()
    choices: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def finished(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if run.finished and not run.tuning]

    @cached_property
    def measure(self) -> Measure:
        """What the runs are compared by."""
        return measure_of(self.finished)

    @cached_property
    def common_settings(self) -> dict[str, Any]:
        """The settings that all finished runs share, but for their folder."""
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
            ValueError: Two runs differ in nothing, so that neither belongs to a seed of its own.
        """
        members: dict[tuple[Row, str], dict[int, Run]] = {}
        for run, row in zip(self.finished, _rows(self.finished), strict=True):
            runs = members.setdefault((row, run.surrogate), {})
            if run.seed in runs:
                raise ValueError(f"{runs[run.seed].name} and {run.name} differ in nothing: leave one of them out")
            runs[run.seed] = run
        left_out = [run for run in self.runs if not run.finished and not run.tuning]
        return [
            Group(
                row=row,
                surrogate=surrogate,
                runs=[runs[seed] for seed in sorted(runs)],
                planned=len(runs) + sum(_belongs(run, row, surrogate) for run in left_out),
                measure=self.measure,
            )
            for (row, surrogate), runs in members.items()
        ]

    @cached_property
    def surrogates(self) -> list[str]:
        """The table's columns."""
        return list(dict.fromkeys(group.surrogate for group in self.groups))

    @cached_property
    def rows(self) -> list[Row]:
        """The table's rows: a row that says less than another one is part of it."""
        rows = list(dict.fromkeys(group.row for group in self.groups))
        return [row for row in rows if not any(set(row) < set(other) for other in rows)]

    def group(self, row: Row, surrogate: str) -> Group | None:
        """The group of a cell; one that does not read all of a row's settings belongs to several rows."""
        fitting = [group for group in self.groups if group.surrogate == surrogate and set(group.row) <= set(row)]
        return max(fitting, key=lambda group: len(group.row), default=None)

    @cached_property
    def differences(self) -> list[Difference]:
        """TROLL's groups (or the first surrogate's) minus each other's; with one surrogate, each group minus the first.

        Two groups meet if they agree on the settings that both read. Those without a common seed are left out.
        """
        if len(self.surrogates) > 1:
            base = DEFAULT_SURROGATE if DEFAULT_SURROGATE in self.surrogates else self.surrogates[0]
            ours = [group for group in self.groups if group.surrogate == base]
            theirs = [group for group in self.groups if group.surrogate != base]
            pairs = [(one, other) for one in ours for other in theirs if agree(one.row, other.row)]
        else:
            pairs = [(group, self.groups[0]) for group in self.groups[1:]]
        estimates = [(one, other, paired_difference(one.finals, other.finals)) for one, other in pairs]
        return [Difference(first, second, found) for first, second, found in estimates if found is not None]


def measure_of(runs: Sequence[Run]) -> Measure:
    """What finished runs can be compared by."""
    finals, rewards = [run.final("success") for run in runs], [run.final("reward") for run in runs]
    return "reward" if set(finals) == {None} and set(rewards) != {None} else "success"


def row_label(row: Row) -> str:
    """A row in words: the recipe, and the settings as ``field=value``."""
    return " ".join(value if name == "recipe" else f"{name}={value}" for name, value in row)


def agree(first: Row, second: Row) -> bool:
    """Whether two rows have no setting in common that differs."""
    values = dict(second)
    return all(values.get(name, value) == value for name, value in first)


def is_comparison(folder: Path) -> bool:
    """Whether ``troll compare`` made this folder."""
    return (folder / MANIFEST).is_file()


def read_comparison(paths: Sequence[Path]) -> Comparison:
    """Reads run folders and comparison folders.

    Raises:
        FileNotFoundError: A folder is neither, or none has a run.
        ValueError: A file is malformed.
    """
    manifests = [read_json(path / MANIFEST) for path in paths if is_comparison(path)]
    commands = [manifest.get("command") for manifest in manifests]
    choices = [choice for manifest in manifests for choice in _tuning(manifest).get("chosen", ())]
    return Comparison(read_runs(paths), [command for command in commands if isinstance(command, str)], choices)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads run folders, and the runs of comparison folders, of which those that have not started are empty.

    Raises:
        FileNotFoundError: A folder is neither, or none has a run.
        ValueError: A file is malformed.
    """
    runs = []
    for path in paths:
        if is_comparison(path):
            manifest = read_json(path / MANIFEST)
            planned, recipes = (manifest.get(key) or {} for key in ("runs", "recipes"))
            tuned, settled = (frozenset(_tuning(manifest).get(key, ())) for key in ("runs", "settled"))
            read = [_read_run(path / name, settings, recipes.get(name)) for name, settings in planned.items()]
            runs += [replace(run, tuning=run.name in tuned, settled=settled) for run in read]
        elif (path / "config.yaml").is_file():
            runs.append(_read_run(path))
        else:
            raise FileNotFoundError(f"{path} is neither a run folder (no config.yaml) nor a comparison ({MANIFEST})")
    if not any((run.folder / "config.yaml").is_file() for run in runs):
        raise FileNotFoundError(f"{paths[0]} has no runs yet")
    return runs


def _tuning(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return manifest.get("tuning") or {}


def _read_run(folder: Path, planned: Mapping[str, Any] | None = None, planned_recipe: str | None = None) -> Run:
    config, summary, metrics = (folder / name for name in ("config.yaml", "summary.json", "metrics.jsonl"))
    return Run(
        name=folder.resolve().name,
        settings=read_settings(config) if config.is_file() else planned or {},
        summary=read_json(summary) if summary.is_file() else {},
        rows=read_metrics(metrics) if metrics.is_file() else [],
        planned_recipe=planned_recipe,
        folder=folder,
    )


def _belongs(run: Run, row: Row, surrogate: str) -> bool:
    """Whether an unfinished run would be one of a group's."""
    (_, recipe), *settings = row
    return (
        run.surrogate == surrogate
        and run.recipe == recipe
        and all(name in run.settings and _text(run.settings[name]) == value for name, value in settings)
    )


def _rows(runs: Sequence[Run]) -> list[Row]:
    """What sets each run apart, other than its surrogate and seed: the recipe, and the settings that runs differ in.

    A setting in which runs of one recipe differ counts for those whose surrogate reads it, or may.
    """
    by_some: set[str] = set().union(*(run.settings_read or () for run in runs))
    own = []
    for run in runs:
        unread = set() if run.settings_read is None else by_some - run.settings_read
        unread |= set(run.summary.get("surrogate_sets", ()))  # the recipe's value was replaced
        unread |= run.settled  # each method has its own value
        own.append({name: _text(value) for name, value in run.settings.items() if name not in _NO_AXIS | unread})
    values: dict[tuple[str, str], set[str]] = {}
    for run, settings in zip(runs, own, strict=True):
        for name, value in settings.items():
            values.setdefault((run.recipe, name), set()).add(value)
    axes = {name for (_, name), seen in values.items() if len(seen) > 1}
    return [
        (("recipe", run.recipe), *((name, value) for name, value in settings.items() if name in axes))
        for run, settings in zip(runs, own, strict=True)
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
