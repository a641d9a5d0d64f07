"""Checks whether a folder can be used for a new run or comparison, or to resume one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troll.files import json_text, read_json, write_atomically
from troll.trl.resumed_settings import may_change
from troll_lab import recipes
from troll_lab.recipes import Recipe, RecipeError, differences
from troll_lab.runs.grid import PlannedRun
from troll_lab.runs.recorded import MANIFEST
from troll_lab.trl.checkpoints import check_complete, last_checkpoint, newest_complete
from troll_lab.values import read_yaml

_DECIDES_THE_DATA = {"eval_size", "eval_tasks"}  # held-out rows are not trained on

#: The lock of a run's folder. With a `_`, transformers does not push it to the hub.
LOCK = "_lock"

_CHOOSE = "choose another folder with --output_dir"


def checkpoint_of(recipe: Recipe, folder: Path) -> str | bool | None:
    """The trainer's `resume_from_checkpoint`: a checkpoint, or True for the last complete one, which it then names.

    It is None for a new run. A folder that does not exist is made.

    Raises:
        RecipeError: If the folder cannot be used or is not empty, or a resumed run has other settings than before or
            lacks a complete checkpoint.
    """
    resume = recipe.training.resume_from_checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (last, _), empty = newest_complete(folder), all(path.name == LOCK for path in folder.iterdir())
    except OSError as error:
        raise RecipeError(f"output_dir {folder} cannot be used: {error.strerror}") from error
    if not resume:
        if not empty:
            or_resume = ", or resume from its last checkpoint with --resume_from_checkpoint" if last else ""
            raise RecipeError(f"output_dir {folder} is not empty: choose another with --output_dir{or_resume}")
        return None
    check_same_run(recipes.plain(recipe), folder, _may_change)
    try:
        if str(resume) in ("last", "true", "True"):  # YAML reads true as a boolean
            last_checkpoint(folder)
            return True
        check_complete(Path(resume))
    except ValueError as error:
        raise RecipeError(f"resume_from_checkpoint: {error}") from error
    return resume


def check_same_run(settings: Mapping[str, Any], folder: Path, may_change: Callable[[str], bool]) -> None:
    """Refuses a folder that holds a run with other settings. A folder without a `config.yaml` holds no run.

    The settings are those of `troll_lab.recipes.plain`; `may_change` tells whether a field, given by its name, may
    differ.

    Raises:
        RecipeError: If settings differ; names the first such field, with both values.
    """
    config = folder / recipes.CONFIG_FILE
    if not config.is_file():
        return
    try:
        found = differences(read_yaml(config), settings, may_change)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if found:
        raise RecipeError(f"{folder} holds a run with other settings: {found[0]}; use the same settings, or {_CHOOSE}")


def _may_change(name: str) -> bool:
    return may_change(name) and name not in _DECIDES_THE_DATA


def claim(
    folder: Path, command: str | None, runs: Sequence[PlannedRun], settled: Sequence[str] = ()
) -> list[PlannedRun]:
    """Writes the manifest of a comparison: its command and the settings of every run.

    The `settled` fields are those whose values were chosen for each method.

    Returns:
        The runs. A recorded one keeps its name, which has fewer fields if the grid was smaller.

    Raises:
        RecipeError: If the folder holds a run that is not in the grid.
    """
    names: dict[str, str] = {}  # of recorded runs, by their names in this grid
    for name, settings in _recorded(folder).items():
        likely = sorted(runs, key=lambda run: run.name != name)  # the first is the usual case
        same = next((run.name for run in likely if not differences(settings, run.settings)), None)
        if same is None:
            closest = min((differences(settings, run.settings) for run in likely), key=len)
            raise RecipeError(
                f"{folder} holds another comparison: its run {name} is not in this grid ({closest[0]}); {_CHOOSE}"
            )
        if same == name or same not in names:
            names[same] = name
    named = [replace(run, name=names.get(run.name, run.name)) for run in runs]
    if len({run.name for run in named}) < len(named):
        raise RecipeError(f"{folder} holds other runs of these names: {_CHOOSE}")
    content = {
        "command": command,
        "settled": list(settled),
        "recipes": {run.name: run.recipe.name for run in named},
        "runs": {run.name: run.settings for run in named},
    }
    write_atomically(folder / MANIFEST, json_text(content, indent=2) + "\n")
    return named


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of the recorded runs by name; empty before the manifest is written."""
    manifest = folder / MANIFEST
    try:
        recorded: Any = read_json(manifest).get("runs") if manifest.is_file() else {}
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is not the manifest of a comparison: {_CHOOSE}")
    return recorded
