"""What several runs say together: groups of runs that differ in their seed alone, and the differences between them.

Reads nothing but the runs' folders, so that it needs neither the trainer nor the recipes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from troll.study.curves import SHARE, number
from troll.study.run_folder import read_json, read_metrics
from troll.study.statistics import Estimate, paired_difference, success_estimate

#: The file that makes a folder a comparison: its runs by name.
MANIFEST = "compare.json"

_SURROGATE, _DEFAULT_SURROGATE = "surrogate", "troll"
# What a setting of this name differs in is not the method.
_NO_AXIS = {"seed", "output_dir", _SURROGATE, "resume_from_checkpoint"}

Row = tuple[tuple[str, str], ...]  # (field, value) of what the runs differ in, but for surrogate and seed


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it.

    Attributes:
        name: The folder's.
        settings: ``config.yaml``.
        summary: ``summary.json``.
        rows: ``metrics.jsonl``.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.summary.get("recipe") or self.name)

    @property
    def surrogate(self) -> str:
        """What kept the updates near the old policy."""
        return str(self.summary.get(_SURROGATE) or self.settings.get(_SURROGATE) or _DEFAULT_SURROGATE)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.settings.get("seed", self.summary.get("seed", 0)))

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return self.summary.get("status") == "finished"

    @property
    def success(self) -> float | None:
        """Held-out success after training."""
        return number(self.summary.get("success_after"), SHARE)


@dataclass(frozen=True)
class Group:
    """The finished runs that differ in their seed alone.

    Attributes:
        row: What sets them apart from other groups of their surrogate.
        surrogate: Theirs.
        runs: At least one, by seed.
    """

    row: Row
    surrogate: str
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """The group in words."""
        return " ".join(filter(None, [row_label(self.row), self.surrogate]))

    @property
    def successes(self) -> dict[int, float]:
        """Final held-out success by seed, of the runs that measured it."""
        return {run.seed: run.success for run in self.runs if run.success is not None}

    @property
    def success(self) -> Estimate | None:
        """Its mean over seeds."""
        values = list(self.successes.values())
        size = number(self.runs[0].summary.get("eval_size"), (1, math.inf))
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
    """

    runs: Sequence[Run]

    @cached_property
    def groups(self) -> list[Group]:
        """The finished runs by everything but their seed, in the order of the runs.

        Raises:
            ValueError: Two runs differ in nothing, so that neither belongs to a seed of its own.
        """
        members: dict[tuple[Row, str], dict[int, Run]] = {}
        for run, row in zip(self.runs, _rows(self.runs), strict=True):
            if run.finished:
                runs = members.setdefault((row, run.surrogate), {})
                if run.seed in runs:
                    raise ValueError(f"{runs[run.seed].name} and {run.name} differ in nothing: leave one of them out")
                runs[run.seed] = run
        return [Group(row, name, [runs[seed] for seed in sorted(runs)]) for (row, name), runs in members.items()]

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
        """Of each row, TROLL (or the first surrogate) minus each other; with one surrogate, each row minus the first.

        Groups without a common seed are left out.
        """
        pairs: Iterable[tuple[Group | None, Group | None]]
        if len(self.surrogates) > 1:
            base = _DEFAULT_SURROGATE if _DEFAULT_SURROGATE in self.surrogates else self.surrogates[0]
            others = [name for name in self.surrogates if name != base]
            pairs = [(self.group(row, base), self.group(row, other)) for row in self.rows for other in others]
        else:
            pairs = [(group, self.groups[0]) for group in self.groups[1:]]
        # Groups that belong to several rows meet in each of them.
        distinct = {(a.row, a.surrogate, b.row, b.surrogate): (a, b) for a, b in pairs if a and b}
        estimates = [(a, b, paired_difference(a.successes, b.successes)) for a, b in distinct.values()]
        return [Difference(first, second, found) for first, second, found in estimates if found is not None]


def row_label(row: Row) -> str:
    """A row in words: the recipe, and the settings as ``field=value``."""
    return " ".join(value if name == "recipe" else f"{name}={value}" for name, value in row)


def is_comparison(folder: Path) -> bool:
    """Whether ``troll compare`` made this folder."""
    return (folder / MANIFEST).is_file()


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads run folders, and the runs of comparison folders as far as they have started.

    Raises:
        FileNotFoundError: A folder is neither, or none has a run.
        ValueError: A file is malformed.
    """
    runs = []
    for path in paths:
        if is_comparison(path):
            names = read_json(path / MANIFEST).get("runs") or {}
            runs += [_read_run(path / name) for name in names if (path / name / "config.yaml").is_file()]
        elif (path / "config.yaml").is_file():
            runs.append(_read_run(path))
        else:
            raise FileNotFoundError(f"{path} is neither a run folder (no config.yaml) nor a comparison ({MANIFEST})")
    if not runs:
        raise FileNotFoundError(f"{paths[0]} has no runs yet")
    return runs


def _read_run(folder: Path) -> Run:
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{folder / 'config.yaml'}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{folder / 'config.yaml'}: expected 'field: value' lines")
    return Run(
        folder.resolve().name,
        settings,
        read_json(summary) if summary.is_file() else {},
        read_metrics(metrics) if metrics.is_file() else [],
    )


def _rows(runs: Sequence[Run]) -> list[Row]:
    """What sets each run apart, beside its surrogate and seed: the recipe, and the settings that runs differ in.

    A setting in which runs of one recipe differ counts for those whose surrogate reads it.
    """
    read = [set(run.summary.get("surrogate_settings") or ()) for run in runs]
    by_some = set().union(*read)
    own = [
        {name: _text(value) for name, value in run.settings.items() if name not in _NO_AXIS | (by_some - mine)}
        for run, mine in zip(runs, read, strict=True)
    ]
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
