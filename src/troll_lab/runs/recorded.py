"""Reads runs from their folders.

This module reads only files, and needs neither the trainer nor the recipes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from troll.files import flat, json_value, read_json
from troll_lab.values import read_yaml

if TYPE_CHECKING:
    import pandas as pd

#: The file that makes a folder a comparison: it holds the settings and the recipe of each run by name, and the command.
MANIFEST = "compare.json"

#: The file of a run with some answers of each evaluation, one evaluation a line.
ANSWERS = "answers.jsonl"

#: The measure of runs: the share of held-out problems solved, or the mean held-out reward if no run measured that.
Measure = Literal["success", "reward"]

DEFAULT_SURROGATE = "troll"

#: The metric in which TRL logs the mean of a task's `success`; and on held-out problems.
SUCCESS = "rewards/success/mean"
HELD_OUT = f"eval_{SUCCESS}"
#: The beginning of the names of the trust region's metrics.
TRUST = "trust_region/"

Range = tuple[float, float]
Rows = Sequence[Mapping[str, Any]]

SHARE: Range = (0.0, 1.0)


@dataclass(frozen=True)
class Run:
    """The data of one run, read from its folder.

    Attributes:
        folder: The folder of the run.
        recipe: The recipe's name, from the summary or the comparison's manifest; without both, the folder's name.
        settings: The settings in the comparison's manifest, if any, and those of `config.yaml`, which come first.
        summary: The content of `summary.json`, empty if the run has not written it.
        rows: The lines of `metrics.jsonl`.
        settled: The settings that were chosen for the run's method, and therefore belong to the method.
    """

    folder: Path
    recipe: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Rows
    settled: frozenset[str]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def surrogate(self) -> str:
        """The run's surrogate."""
        return str(self.summary.get("surrogate") or self.settings.get("surrogate") or DEFAULT_SURROGATE)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.settings.get("seed", self.summary.get("seed", 0)))

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return self.summary.get("status") == "finished"

    @property
    def status(self) -> str:
        """The state of an unfinished run, in words."""
        started = (self.folder / "config.yaml").is_file()
        return str(self.summary.get("status") or ("unfinished" if started else "not started"))

    @property
    def settings_read(self) -> set[str] | None:
        """The settings that its surrogate reads and some others do not; None if unknown."""
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
            runs += [_read_run(path / name, planned[name], recipes.get(name), settled) for name in planned]
        elif (path / "config.yaml").is_file():
            runs.append(_read_run(path, {}, None, frozenset()))
        else:
            raise FileNotFoundError(f"{path} is neither a run folder (no config.yaml) nor a comparison ({MANIFEST})")
    if not any((run.folder / "config.yaml").is_file() for run in runs):
        raise FileNotFoundError(f"{paths[0]} has no runs yet")
    return runs


def _read_run(folder: Path, planned: Mapping[str, Any], planned_recipe: str | None, settled: frozenset[str]) -> Run:
    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    # The manifest may have values that the configuration leaves out, since they are defaults.
    settings = flat({**(planned or {}), **json_value(read_yaml(config) if config.is_file() else {})})
    summary = read_summary(folder)
    recipe = str(summary.get("recipe") or planned_recipe or folder.resolve().name)
    rows = read_metrics(metrics) if metrics.is_file() else []
    return Run(folder, recipe, settings, summary, rows, settled)


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads the `summary.json` of a run's folder; empty if the run has not written it.

    Raises:
        ValueError: If the file does not hold a JSON object.
    """
    path = folder / "summary.json"
    return read_json(path) if path.is_file() else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl` or `answers.jsonl`: objects with an integer `step`.

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


def number(value: object, within: Range = (-math.inf, math.inf)) -> float | None:
    """`value` if it is a finite number in the closed interval `within`, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if within[0] <= value <= within[1] else None


def eval_questions(summary: Mapping[str, Any]) -> int | None:
    """The number of different held-out problems: a problem that was drawn twice gives no second independent answer."""
    different = number(summary.get("eval_questions"), (1, math.inf))
    return None if different is None else int(different)


def metric(rows: Rows, key: str) -> pd.Series:
    """The values of a metric by step; if a resumed run logged a step twice, the later value."""
    import pandas as pd  # here, since training must neither wait for it nor need it

    values = {row["step"]: value for row in rows if (value := number(row.get(key))) is not None}
    return pd.Series(values, dtype=float).sort_index()
