"""The manifest of a comparison: its command, the settings of every run, and the choices of its tuning."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troll.files import read_json, write_atomically
from troll.recipes import RecipeError, differences
from troll.runs.comparison import MANIFEST
from troll.runs.grid import PlannedRun
from troll.runs.tuning import Tuning

_ANOTHER_FOLDER = "choose another folder with --output_dir"


def claim(
    folder: Path,
    command: str | None,
    runs: Sequence[PlannedRun],
    tuned: Sequence[PlannedRun] = (),
    tuning: Mapping[str, Any] | None = None,
) -> list[PlannedRun]:
    """Writes the manifest of a comparison of which all runs are known.

    Args:
        folder: The folder of the comparison.
        command: The command that made it.
        runs: All runs of the grid; of a tuning, those of the second stage.
        tuned: The runs of a tuning's first stage, from `claim_tuning`.
        tuning: What the manifest holds about the tuning, from `Tuning.record`.

    Returns:
        The runs. A recorded one keeps its name, which has fewer fields if the grid was smaller.

    Raises:
        RecipeError: If the folder holds a run that is not in the grid.
    """
    recorded = _read(folder)["runs"]
    _check(folder, recorded, [*tuned, *runs])
    named = _named(folder, recorded, runs)
    _write(folder, command, [*tuned, *named], tuning)
    return named


def claim_tuning(folder: Path, command: str | None, tuning: Tuning) -> list[PlannedRun]:
    """Writes the manifest of a comparison whose tuning has not chosen yet.

    Recorded runs of the second stage stay in it, as far as that stage is known.

    Args:
        folder: The folder of the comparison.
        command: The command that made it.
        tuning: The plan of both stages.

    Returns:
        The runs of the first stage, with their recorded names.

    Raises:
        RecipeError: If the folder holds a run that is in neither stage.
    """
    runs, counted = tuning.runs(), tuning.counted()
    content = _read(folder)
    tuned = set((content.get("tuning") or {}).get("runs", ()))
    first = {name: settings for name, settings in content["runs"].items() if name in tuned}
    second = {name: settings for name, settings in content["runs"].items() if name not in tuned}
    _check(folder, first, runs)
    _check(folder, second, counted, tuning.settled)
    named = _named(folder, first, runs)
    recipes = {name: recipe for name, recipe in (content.get("recipes") or {}).items() if name in second}
    _write(folder, command, named, tuning.record(named), {"recipes": recipes, "runs": second})
    return named


def _read(folder: Path) -> dict[str, Any]:
    """The content of the manifest, with the settings of the recorded runs by name; no runs if there is none yet."""
    manifest = folder / MANIFEST
    try:
        content = read_json(manifest) if manifest.is_file() else {"runs": {}}
    except ValueError as error:
        raise RecipeError(str(error)) from error
    recorded: Any = content.get("runs")
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is no manifest of a comparison: {_ANOTHER_FOLDER}")
    return content


def _check(
    folder: Path,
    recorded: Mapping[str, Mapping[str, Any]],
    runs: Sequence[PlannedRun],
    open_fields: Collection[str] = (),
) -> None:
    """Refuses a recorded run that is none of `runs`, without comparing the fields that are not known yet."""
    by_name = {run.name: run for run in runs}
    for name, settings in recorded.items():

        def apart(run: PlannedRun, settings: Mapping[str, Any] = settings) -> list[str]:
            return differences(settings, run.settings, lambda field: field in open_fields)

        if name in by_name and not apart(by_name[name]):
            continue  # the usual case, without comparing every pair
        closest = min(map(apart, sorted(runs, key=lambda run: run.name != name)), key=len)
        if closest:
            raise RecipeError(
                f"{folder} holds another comparison: its run {name} is not in this grid ({closest[0]}); "
                f"{_ANOTHER_FOLDER}"
            )


def _named(folder: Path, recorded: Mapping[str, Mapping[str, Any]], runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    named = [replace(run, name=_recorded_name(run, recorded) or run.name) for run in runs]
    if len({run.name for run in named}) < len(named):
        raise RecipeError(f"{folder} holds other runs of these names: {_ANOTHER_FOLDER}")
    return named


def _recorded_name(run: PlannedRun, recorded: Mapping[str, Mapping[str, Any]]) -> str | None:
    likely = [run.name] if run.name in recorded else []
    return next((name for name in [*likely, *recorded] if not differences(recorded[name], run.settings)), None)


def _write(
    folder: Path,
    command: str | None,
    runs: Sequence[PlannedRun],
    tuning: Mapping[str, Any] | None = None,
    others: Mapping[str, Mapping[str, Any]] = {"recipes": {}, "runs": {}},
) -> None:
    content: dict[str, Any] = {
        "command": command,
        "recipes": {run.name: run.recipe.name for run in runs} | dict(others["recipes"]),
        "runs": {run.name: run.settings for run in runs} | dict(others["runs"]),
    }
    if tuning is not None:
        content["tuning"] = tuning
    write_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
