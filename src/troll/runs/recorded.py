"""Runs as their folders describe them.

It reads only files, and needs neither the trainer nor the recipes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from troll.files import flat, read_json, read_yaml
from troll.runs.curves import SHARE, number

#: The file that makes a folder a comparison: it holds the settings and the recipe of each run by name, and the command.
MANIFEST = "compare.json"

#: The measure of runs: the share of held-out problems solved, or the mean held-out reward if no run measured that.
Measure = Literal["success", "reward"]

SURROGATE, DEFAULT_SURROGATE = "surrogate", "troll"


@dataclass(frozen=True)
class Run:
    """One run, as its folder describes it.

    Attributes:
        name: The name of the folder.
        settings: The content of `config.yaml`; before the run has started, its settings in the comparison's manifest.
        summary: The content of `summary.json`, empty if the run has not written it.
        rows: The lines of `metrics.jsonl`.
        planned_recipe: The recipe in the manifest, for runs without a summary.
        folder: The folder of the run.
        settled: The settings that were chosen for its method, and so belong to the method.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    planned_recipe: str | None
    folder: Path
    settled: frozenset[str] = frozenset()

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.summary.get("recipe") or self.planned_recipe or self.name)

    @property
    def surrogate(self) -> str:
        """The surrogate, which kept the updates near the old policy."""
        return str(self.summary.get(SURROGATE) or self.settings.get(SURROGATE) or DEFAULT_SURROGATE)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.settings.get("seed", self.summary.get("seed", 0)))

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return is_finished(self.summary)

    @property
    def status(self) -> str:
        """The state of an unfinished run, in words."""
        started = (self.folder / "config.yaml").is_file()
        return str(self.summary.get("status") or ("unfinished" if started else "not started"))

    @property
    def settings_read(self) -> set[str] | None:
        """The settings that its surrogate reads and some others do not; None if unknown: it may then read any."""
        names = self.summary.get("surrogate_settings")
        return None if names is None else set(names)

    def final(self, measure: Measure) -> float | None:
        """The held-out success or reward after training."""
        return number(self.summary.get(f"{measure}_after"), SHARE if measure == "success" else (-math.inf, math.inf))


def is_comparison(folder: Path) -> bool:
    """Whether `troll compare` made this folder."""
    return (folder / MANIFEST).is_file()


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads run folders, and the runs of comparison folders; runs that have not started are empty.

    Raises:
        FileNotFoundError: If a folder is neither, or none has a run.
        ValueError: If a file is malformed.
    """
    runs = []
    for path in paths:
        if is_comparison(path):
            manifest = read_json(path / MANIFEST)
            planned, recipes = (manifest.get(key) or {} for key in ("runs", "recipes"))
            settled = frozenset(manifest.get("settled", ()))
            read = [_read_run(path / name, settings, recipes.get(name)) for name, settings in planned.items()]
            runs += [replace(run, settled=settled) for run in read]
        elif (path / "config.yaml").is_file():
            runs.append(_read_run(path))
        else:
            raise FileNotFoundError(f"{path} is neither a run folder (no config.yaml) nor a comparison ({MANIFEST})")
    if not any((run.folder / "config.yaml").is_file() for run in runs):
        raise FileNotFoundError(f"{paths[0]} has no runs yet")
    return runs


def _read_run(folder: Path, planned: Mapping[str, Any] | None = None, planned_recipe: str | None = None) -> Run:
    config, summary, metrics = (folder / name for name in ("config.yaml", "summary.json", "metrics.jsonl"))
    return Run(
        name=folder.resolve().name,
        settings=flat(read_yaml(config) if config.is_file() else planned or {}),
        summary=read_json(summary) if summary.is_file() else {},
        rows=read_metrics(metrics) if metrics.is_file() else [],
        planned_recipe=planned_recipe,
        folder=folder,
    )


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Whether training reached its end, according to `summary.json`."""
    return summary.get("status") == "finished"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl`: objects with an integer `step`.

    Raises:
        ValueError: If a line is not one. A last line that a crash cut short is left out instead.
    """
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if line_number == len(lines) and not line.endswith(b"\n"):
                break  # the run was killed while it wrote this line
            raise ValueError(f"{path}, line {line_number}: not JSON ({error})") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f'{path}, line {line_number}: expected an object with an integer "step"')
        rows.append(row)
    return rows
