"""The manifest of a comparison: its command, the settings of every run, and what its tuning chose."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troll.files import write_atomically
from troll.recipes import RecipeError, differences
from troll.run_folder import read_json
from troll.study.comparison import MANIFEST
from troll.study.grid import PlannedRun
from troll.study.tuning import Choice

_ANOTHER_FOLDER = "choose another folder with --output_dir"


def claim(folder: Path, command: str | None, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Writes the manifest of a comparison without a tuning.

    Args:
        folder: The comparison's.
        command: That made it.
        runs: All of them.

    Returns:
        The runs. One that was recorded keeps its name, which has fewer fields in it in a smaller grid.

    Raises:
        RecipeError: If the folder holds a run that is not among them.
    """
    recorded, _ = _read(folder)
    _check(folder, recorded, runs)
    named = _named(folder, recorded, runs)
    _write(folder, command, named)
    return named


def claim_tuning(
    folder: Path,
    command: str | None,
    tuned: Sequence[PlannedRun],
    counted: Sequence[PlannedRun],
    settled: Sequence[str],
) -> list[PlannedRun]:
    """Writes the manifest of a comparison whose tuning has to choose yet.

    Args:
        folder: The comparison's.
        command: That made it.
        tuned: The runs of the first stage.
        counted: Those of the second, as far as they are known. Recorded ones stay in the manifest.
        settled: The fields whose values the tuning chooses.

    Returns:
        The runs of the first stage, with their recorded names.

    Raises:
        RecipeError: If the folder holds a run that is in neither stage.
    """
    recorded, tuning = _read(folder)
    first = {name: settings for name, settings in recorded.items() if name in tuning}
    second = {name: settings for name, settings in recorded.items() if name not in tuning}
    _check(folder, first, tuned)
    _check(folder, second, counted, settled)
    named = _named(folder, first, tuned)
    _write(folder, command, named, {"settled": list(settled), "runs": [run.name for run in named]}, second)
    return named


def claim_counted(
    folder: Path,
    command: str | None,
    tuned: Sequence[PlannedRun],
    counted: Sequence[PlannedRun],
    settled: Sequence[str],
    choices: Sequence[Choice],
) -> list[PlannedRun]:
    """Writes the manifest of a comparison whose tuning has chosen.

    Args:
        folder: The comparison's.
        command: That made it.
        tuned: From `claim_tuning`.
        counted: The runs of the second stage.
        settled: The fields whose values the tuning chose.
        choices: What it chose.

    Returns:
        The runs of the second stage, with their recorded names.

    Raises:
        RecipeError: If the folder holds a run that is in neither stage.
    """
    recorded, _ = _read(folder)
    _check(folder, recorded, [*tuned, *counted])
    named = _named(folder, recorded, counted)
    chosen = [choice.as_json() for choice in choices]
    tuning = {"settled": list(settled), "runs": [run.name for run in tuned], "chosen": chosen}
    _write(folder, command, [*tuned, *named], tuning)
    return named


def _read(folder: Path) -> tuple[dict[str, dict[str, Any]], Collection[str]]:
    """The settings of the recorded runs by name, and the names of those of a tuning."""
    manifest = folder / MANIFEST
    try:
        content = read_json(manifest) if manifest.is_file() else {"runs": {}}
    except ValueError as error:
        raise RecipeError(str(error)) from error
    recorded: Any = content.get("runs")
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is no manifest of a comparison: {_ANOTHER_FOLDER}")
    return recorded, set((content.get("tuning") or {}).get("runs", ()))


def _check(
    folder: Path,
    recorded: Mapping[str, Mapping[str, Any]],
    runs: Sequence[PlannedRun],
    open_fields: Collection[str] = (),
) -> None:
    """Refuses a recorded run that is none of `runs`, but for the fields that are not known yet."""
    by_name = {run.name: run for run in runs}
    for name, settings in recorded.items():

        def apart(run: PlannedRun, settings: Mapping[str, Any] = settings) -> list[str]:
            return differences(settings, run.settings, lambda field: field in open_fields)

        if name in by_name and not apart(by_name[name]):
            continue  # as a rule: without a look at every pair
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
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    content = {
        "command": command,
        "recipes": {run.name: run.recipe.name for run in runs},
        "runs": {run.name: run.settings for run in runs} | dict(others or {}),
    }
    if tuning is not None:
        content["tuning"] = dict(tuning)
    write_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
