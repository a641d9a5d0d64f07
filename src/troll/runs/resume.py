"""Whether a folder can take a run: a new one, or one that resumes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from troll import recipes
from troll.files import read_yaml
from troll.recipes import Recipe, RecipeError
from troll.trl.checkpoints import check_complete, last_checkpoint, newest_complete

# The settings that a resumed run may change, and all that begin with one of these: its length and its output.
_MAY_CHANGE = {"max_steps", "num_train_epochs", "output_dir", "report_to", "run_name"}
_MAY_CHANGE_PREFIXES = ("save_", "logging_", "eval_")
_DECIDES_THE_DATA = {"eval_size", "eval_tasks"}  # what is held out is not trained on


def checkpoint_of(recipe: Recipe, folder: Path) -> str | bool | None:
    """The trainer's `resume_from_checkpoint`: a checkpoint, or True for the last complete one, which it then names.

    Args:
        recipe: The recipe of the run.
        folder: The folder of the run; made if it does not exist.

    Returns:
        None for a run that starts anew.

    Raises:
        RecipeError: If the folder cannot be used or is not empty, or a resumed run has other settings than before or no
            complete checkpoint.
    """
    resume = recipe.training.resume_from_checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (last, _), empty = newest_complete(folder), not any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"output_dir {folder} cannot be used: {error.strerror}") from error
    if not resume:
        if not empty:
            or_resume = ", or resume from its last checkpoint with --resume_from_checkpoint" if last else ""
            raise RecipeError(f"output_dir {folder} is not empty: choose another with --output_dir{or_resume}")
        return None
    check_same_run(recipes.plain(recipe), folder, _may_change)
    try:
        if resume in ("last", "true", "True"):
            last_checkpoint(folder)
            return True
        check_complete(Path(resume))
    except ValueError as error:
        raise RecipeError(f"resume_from_checkpoint: {error}") from error
    return resume


def check_same_run(settings: Mapping[str, Any], folder: Path, may_change: Callable[[str], bool]) -> None:
    """Refuses a folder that holds a run with other settings. A folder without a `config.yaml` holds no run.

    Args:
        settings: The settings from `troll.recipes.plain`.
        folder: The folder of the run.
        may_change: Whether a field, given by its name, may differ.

    Raises:
        RecipeError: If settings differ; names the first such field, with both values.
    """
    config = folder / recipes.CONFIG_FILE
    if not config.is_file():
        return
    try:
        found = recipes.differences(read_yaml(config), settings, may_change)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if found:
        raise RecipeError(
            f"{folder} holds a run with other settings: {found[0]}; use the same settings, or choose another folder "
            "with --output_dir"
        )


def _may_change(name: str) -> bool:
    return name in _MAY_CHANGE or (name.startswith(_MAY_CHANGE_PREFIXES) and name not in _DECIDES_THE_DATA)
