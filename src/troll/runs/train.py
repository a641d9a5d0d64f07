"""`troll train`: one run, from a recipe to a folder with a model, its metrics and a report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from troll import recipes
from troll.recipes import Recipe
from troll.runs.build import build
from troll.runs.callbacks import OtherTasks, ProgressLine, RunFiles
from troll.runs.result import RunResult
from troll.terminal import FAILED, INTERRUPTED, fail, say, silence_libraries
from troll.trl import TrollConfig
from troll.trl.ungraded import NothingJudgedError


def train_command(recipe_name: str, overrides: Sequence[str]) -> int:
    """Trains by the recipe of a name or path, with the fields that follow it on the command line.

    Returns:
        The exit code.

    Raises:
        troll.terminal.UsageError: If the recipe cannot be followed.
    """
    silence_libraries()
    try:
        finished = train(recipes.load(recipe_name, overrides), Console())
    except (FloatingPointError, NothingJudgedError) as error:
        return fail(error, FAILED)
    return 0 if finished else INTERRUPTED


def train(recipe: Recipe, console: Console) -> bool:
    """Trains, and leaves a run folder.

    It holds `config.yaml`, `task.json`, `metrics.jsonl`, `summary.json`, `README.md`, `report.html`, the `model` and
    checkpoints. Every mistake in a recipe is found before the first step.

    Returns:
        Whether training reached its end. Ctrl-C leaves a folder that is just as complete and can be resumed.

    Raises:
        RecipeError: As `troll.runs.build.build`.
        FloatingPointError: If logits become NaN or infinite; the folder is as complete as after Ctrl-C.
        troll.tasks.TaskError: As `troll.runs.build.build`.
    """
    run = build(recipe, console)
    trainer, folder = run.trainer, run.folder
    if trainer.is_world_process_zero():
        recipes.save(recipe, folder / recipes.CONFIG_FILE)
        run.trained_on.write(folder)
        say(console, f"training on {run.task.name} with {_method(recipe.training)}; output in {folder}")
        if recipe.note:
            say(console, recipe.note)

    progress = ProgressLine(console)
    trainer.add_callback(RunFiles(folder, run.trained_on))
    trainer.add_callback(progress)
    if run.others:
        trainer.add_callback(OtherTasks(trainer, run.others))

    result = RunResult(run)
    # TRL would write its own card, which knows nothing of the run, with every checkpoint and before every push.
    trainer.create_model_card = result.write_card  # type: ignore[method-assign]
    status = "failed"
    try:
        trainer.train(resume_from_checkpoint=run.checkpoint)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        progress.stop()
        result.write(status, console)
    return status == "finished"


def _method(training: TrollConfig) -> str:
    """The surrogate and the estimator in words, with the trust region's bound if there is one."""
    names = {
        "troll": f"TROLL, KL bound {training.kl_bound}",
        "regression": f"TROLL's regression term only, KL bound {training.kl_bound}",
        "kl_penalty": f"a KL penalty, weight {training.penalty_weight}",
        "none": "no clip and no trust region",
    }
    surrogate = names.get(training.surrogate, f"surrogate {training.surrogate}")
    return surrogate if training.advantage_estimator == "group" else f"{surrogate}, {training.advantage_estimator}"
