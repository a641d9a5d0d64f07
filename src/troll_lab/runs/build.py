"""Builds a run from its recipe, and finds mistakes in the recipe, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoProcessor, PreTrainedTokenizerBase, PrinterCallback, ProcessorMixin, ProgressCallback
from trl import get_peft_config, get_quantization_config

from troll.trl.checks import refuse_few_rows
from troll.trl.resumed_settings import may_change
from troll_lab import recipes
from troll_lab.evaluation.model import not_loadable
from troll_lab.evaluation.training_task import TrainingTask
from troll_lab.lock import ANOTHER_FOLDER
from troll_lab.recipes import Recipe, RecipeError
from troll_lab.runs.publishing import check_back_ends, check_hub
from troll_lab.runs.toy_model import toy_model
from troll_lab.runs.toy_network import TOY, TOY_MODELS
from troll_lab.tasks import Task, load_task
from troll_lab.tasks.chat_template import prompt_texts
from troll_lab.tasks.loading import decontaminate
from troll_lab.terminal import one_line, raised_as
from troll_lab.trl import LabTrainer
from troll_lab.trl.checkpoints import check_complete, last_checkpoint, newest_complete
from troll_lab.user_files import load_function
from troll_lab.values import read_yaml

#: The lock of a run's folder. With a `_`, transformers does not push it to the hub.
LOCK = "_lock"

_DECIDES_THE_DATA = {"eval_size", "eval_tasks"}  # held-out rows are not trained on


@dataclass(frozen=True)
class BuiltRun:
    """A run that can start.

    Attributes:
        recipe: The recipe, with every setting resolved.
        folder: Its folder, which exists.
        checkpoint: The trainer's `resume_from_checkpoint`.
        task: The task to train on.
        others: The other tasks to evaluate on.
        trained_on: The model's prompts, for `task.json`.
        trainer: The trainer, without transformers' own progress output.
    """

    recipe: Recipe
    folder: Path
    checkpoint: str | bool | None
    task: Task
    others: Sequence[Task]
    trained_on: TrainingTask
    trainer: LabTrainer


def build(recipe: Recipe, folder: Path) -> BuiltRun:
    """Checks a recipe, loads its model and tasks, and makes the trainer.

    Raises:
        RecipeError: If the output folder, the model, a checkpoint, a logging back end or the hub cannot be used, or a
            resumed run has other settings than before.
        UsageError: If the rollout function cannot be loaded.
        troll_lab.tasks.TaskError: If the task cannot be loaded, or the model's chat template refuses the prompts.
    """
    with raised_as(RecipeError):
        check_back_ends(recipe.training.report_to or [])
        check_hub(recipe.training)
    named = recipe.task.rollout_func
    rollout_func = load_function(named, Path(), "rollout_func")[0] if named else None
    # One process comes first, and the others find the cached model.
    with recipe.training.main_process_first(local=False):
        checkpoint = checkpoint_of(recipe, folder)
        path = model_path(recipe)
    processor = _processor(recipe, path)
    task, others = _tasks(recipe, conversational=processor.chat_template is not None)
    variables = dict(recipe.training.chat_template_kwargs or {})  # type: ignore[arg-type]  # a string was parsed
    for each in (task, *others):
        if "images" not in each.eval_dataset.column_names:  # as TRL will: some templates refuse some conversations
            prompt_texts(processor, [each.eval_dataset.select_columns("prompt")[0]["prompt"]], each.name, variables)
    trainer = _trainer(recipe, path, processor, task, rollout_func)
    # A resumed run has its first evaluation in the checkpoint's log; another one would use up random numbers.
    trainer.args.eval_on_start = trainer.args.eval_on_start and checkpoint is None
    return BuiltRun(recipe, folder, checkpoint, task, others, TrainingTask.of(recipe.task, variables), trainer)


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
    settings = recipes.plain(recipe)

    def may_differ(name: str) -> bool:
        return may_change(name) and name not in _DECIDES_THE_DATA

    check_same_run(settings, folder, may_differ)
    with raised_as(RecipeError, "resume_from_checkpoint: "):
        if str(resume) in ("last", "true", "True"):  # YAML reads true as a boolean
            last_checkpoint(folder)
            return True
        check_complete(Path(resume))
    check_same_run(settings, Path(resume).parent, may_differ)
    return resume


def check_same_run(settings: Mapping[str, Any], folder: Path, may_differ: Callable[[str], bool]) -> None:
    """Refuses a folder that holds a run with other settings. A folder without a `config.yaml` holds no run.

    The settings are those of `troll_lab.recipes.plain`; `may_differ` tells whether a field, given by its name, may
    differ.

    Raises:
        RecipeError: If settings differ; names the first such field, with both values.
    """
    config = folder / recipes.CONFIG_FILE
    if not config.is_file():
        return
    with raised_as(RecipeError):
        found = recipes.differences(read_yaml(config), settings, may_differ)
    if found:
        raise RecipeError(
            f"{folder} holds a run with other settings: {found[0]}; use the same settings, or {ANOTHER_FOLDER}"
        )


def model_path(recipe: Recipe) -> str:
    """The name or the folder of the recipe's model; a toy model is made if the cache lacks it.

    Raises:
        RecipeError: If the recipe names no model, or a toy model cannot be kept.
        troll_lab.tasks.TaskError: If the toy model cannot learn the task.
    """
    name = recipe.model.model_name_or_path
    if name is None:
        raise RecipeError("no model: name one with --model_name_or_path")
    if name not in TOY_MODELS:
        if recipe.task.warm_up:
            raise RecipeError(
                f"warm_up is how the model {TOY!r} learns the task before the run: leave it out for {name!r}"
            )
        return name
    try:
        return str(toy_model(recipe.task, name, seed=recipe.training.seed))
    except OSError as error:
        raise RecipeError(f"the toy model cannot be kept in the cache folder: {error}") from error


def _tasks(recipe: Recipe, conversational: bool) -> tuple[Task, list[Task]]:
    """The task to train on, and the other tasks to evaluate on."""
    if recipe.task.eval_tasks and recipe.training.dataloader_persistent_workers:
        raise RecipeError(
            "eval_tasks and dataloader_persistent_workers exclude each other: transformers keeps the workers of one "
            "data set, and would evaluate on it again; leave one of them out"
        )
    task = load_task(recipe.task, conversational=conversational, for_training=True)
    others = [load_task(config, conversational=conversational) for config in recipe.task.other_tasks()]
    return (decontaminate(task, others) if others else task), others


def _processor(recipe: Recipe, model_path: str) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The model's tokenizer; for a vision-language model, its processor."""
    try:
        return AutoProcessor.from_pretrained(
            model_path,
            revision=recipe.model.model_revision,
            trust_remote_code=recipe.training.trust_remote_code,
            padding_side="left",
        )
    except ImportError as error:
        raise RecipeError(
            f"the processor of {model_path} needs a package that is missing: {one_line(error)}"
        ) from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"model_name_or_path: {not_loadable(model_path)}") from error


def _trainer(
    recipe: Recipe,
    model_path: str,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    task: Task,
    rollout_func: Callable[..., Any] | None,
) -> LabTrainer:
    training, model = recipe.training, recipe.model
    # As in TRL's own script; the configuration has parsed a string.
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    } | dict(training.model_init_kwargs or {})  # type: ignore[arg-type]
    training.disable_tqdm = True
    if training.reward_weights is None:
        training.reward_weights = task.reward_weights
    try:
        trainer = LabTrainer(
            model_path,
            task.reward_funcs,
            training,
            train_dataset=task.train_dataset,
            eval_dataset=task.eval_dataset,
            processing_class=processor,
            peft_config=get_peft_config(model),
            quantization_config=get_quantization_config(model),
            rollout_func=rollout_func,
        )
        refuse_few_rows(trainer)
    except SafetensorError as error:
        raise RecipeError(
            f"the weights of {model_path} cannot be read, {error}: download or save them again"
        ) from error
    except OSError as error:
        raise RecipeError(f"model_name_or_path: {not_loadable(model_path)}") from error
    except ValueError as error:  # some settings are checked only here
        raise RecipeError(one_line(error)) from error
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer
