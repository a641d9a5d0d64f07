"""The manifest of a comparison: its command and the settings of every run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troll.files import read_json, write_atomically
from troll.recipes import RecipeError, differences
from troll.runs.grid import PlannedRun
from troll.runs.recorded import MANIFEST

_ANOTHER_FOLDER = "choose another folder with --output_dir"


def claim(
    folder: Path,
    command: str | None,
    runs: Sequence[PlannedRun],
    settled: Sequence[str] = (),
) -> list[PlannedRun]:
    """Writes the manifest of a comparison.

    Args:
        folder: The folder of the comparison.
        command: The command that made it.
        runs: All runs of the grid.
        settled: The fields whose values were chosen for each method.

    Returns:
        The runs. A recorded one keeps its name, which has fewer fields if the grid was smaller.

    Raises:
        RecipeError: If the folder holds a run that is not in the grid.
    """
    recorded = _recorded(folder)
    _check(folder, recorded, runs)
    named = [replace(run, name=_recorded_name(run, recorded) or run.name) for run in runs]
    if len({run.name for run in named}) < len(named):
        raise RecipeError(f"{folder} holds other runs of these names: {_ANOTHER_FOLDER}")
    content = {
        "command": command,
        "settled": list(settled),
        "recipes": {run.name: run.recipe.name for run in named},
        "runs": {run.name: run.settings for run in named},
    }
    write_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
    return named


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of the recorded runs by name; empty if there is no manifest yet."""
    manifest = folder / MANIFEST
    try:
        recorded: Any = read_json(manifest).get("runs") if manifest.is_file() else {}
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is no manifest of a comparison: {_ANOTHER_FOLDER}")
    return recorded


def _check(folder: Path, recorded: Mapping[str, Mapping[str, Any]], runs: Sequence[PlannedRun]) -> None:
    """Refuses a recorded run that is none of `runs`."""
    by_name = {run.name: run for run in runs}
    for name, settings in recorded.items():

        def apart(run: PlannedRun, settings: Mapping[str, Any] = settings) -> list[str]:
            return differences(settings, run.settings)

        if name in by_name and not apart(by_name[name]):
            continue  # the usual case, without comparing every pair
        closest = min(map(apart, sorted(runs, key=lambda run: run.name != name)), key=len)
        if closest:
            raise RecipeError(
                f"{folder} holds another comparison: its run {name} is not in this grid ({closest[0]}); "
                f"{_ANOTHER_FOLDER}"
            )


def _recorded_name(run: PlannedRun, recorded: Mapping[str, Mapping[str, Any]]) -> str | None:
    likely = [run.name] if run.name in recorded else []
    return next((name for name in [*likely, *recorded] if not differences(recorded[name], run.settings)), None)
