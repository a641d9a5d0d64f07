"""One training run, from a recipe to a folder with a model, its metrics and a report."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoProcessor, PreTrainedTokenizerBase, PrinterCallback, ProcessorMixin, ProgressCallback
from trl import get_peft_config, get_quantization_config

from troll import recipes
from troll.evaluation.model import longest_prompt
from troll.evaluation.training_task import TrainingTask
from troll.files import write_atomically
from troll.recipes import Recipe, RecipeError
from troll.run_folder import read_yaml
from troll.study.callbacks import MetricsFile, OtherTasks, ProgressLine, TaskFile
from troll.study.card import CARD_FILE, model_card
from troll.study.embedded import embedded_model
from troll.study.memory import UnknownMemory
from troll.study.plan import Plan, this_machine
from troll.study.publishing import check_back_ends, check_hub, push
from troll.study.small_model import EMBEDDED, EMBEDDED_MODELS
from troll.study.summary import commit_of, summary_of, tell, write_verdicts
from troll.tasks import Task, load_task
from troll.tasks.decontaminate import decontaminate
from troll.terminal import one_line, say
from troll.trl import TrollConfig, TrollTrainer
from troll.trl.checkpoints import check_complete, last_checkpoint, newest_complete

# The settings that a resumed run may change, and all that begin with one of these: its length and its output.
_MAY_CHANGE = {"max_steps", "num_train_epochs", "output_dir", "report_to", "run_name"}
_MAY_CHANGE_PREFIXES = ("save_", "logging_", "eval_")
_DECIDES_THE_DATA = {"eval_size", "eval_tasks"}  # what is held out is not trained on


def train(recipe: Recipe, console: Console) -> bool:
    """Trains, and leaves a run folder.

    It holds `config.yaml`, `task.json`, `metrics.jsonl`, `summary.json`, `README.md`, `report.html`, the `model` and
    checkpoints. Every mistake in a recipe is found before the first step.

    Args:
        recipe: The recipe from `troll.recipes.load`.
        console: The console for progress and results.

    Returns:
        Whether training reached its end. Ctrl-C leaves a folder that is just as complete and can be resumed.

    Raises:
        RecipeError: If the output folder, the model, a checkpoint, a logging back end or the hub cannot be used, or a
            resumed run has other settings than before.
        FloatingPointError: If logits become NaN or infinite; the folder is as complete as after Ctrl-C.
        troll.tasks.TaskError: If the task cannot be loaded.
    """
    folder = Path(recipe.training.output_dir or "trainer_output")
    try:
        check_back_ends(recipe.training.report_to or [])
        check_hub(recipe.training)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    # One process comes first, and the others find the cached model.
    with recipe.training.main_process_first(local=False):
        checkpoint = _checkpoint(recipe, folder)
        path = model_path(recipe)
    processor = _processor(recipe, path)
    task, others = _tasks(recipe, conversational=processor.chat_template is not None)
    for each in (task, *others):
        _check_prompt(recipe, processor, each)
    _check_memory(recipe, path, [task, *others], processor, console)
    trainer = _trainer(recipe, path, processor, task)

    main = trainer.is_world_process_zero()
    trained_on = TrainingTask.of(recipe.task, _template_variables(recipe))
    if main:
        recipes.save(recipe, folder / recipes.CONFIG_FILE)
        trained_on.write(folder)
        say(console, f"training on {task.name} with {_method(recipe.training)}; output in {folder}")
        if recipe.note:
            say(console, recipe.note)
    progress = ProgressLine(console)
    trainer.add_callback(MetricsFile(folder / "metrics.jsonl"))
    trainer.add_callback(TaskFile(trained_on))
    trainer.add_callback(progress)
    if others:
        trainer.add_callback(OtherTasks(trainer, others))

    # A resumed run has its first evaluation in the checkpoint's log; another one would use up random numbers.
    trainer.args.eval_on_start = trainer.args.eval_on_start and checkpoint is None
    start, status, commit = time.monotonic(), "unfinished", commit_of(Path(__file__).parents[1])

    def summarise() -> dict[str, Any]:
        return summary_of(recipe, trainer, status, time.monotonic() - start, len(task.eval_dataset), commit)

    def write_card(*_: Any, **__: Any) -> None:
        if main:
            name = trainer.hub_model_id or str(folder / "model")
            write_atomically(folder / CARD_FILE, model_card(recipe, task, trained_on, summarise(), name))

    # TRL would write its own card, which knows nothing of the run, with every checkpoint and before every push.
    trainer.create_model_card = write_card  # type: ignore[method-assign]
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
    except BaseException:
        status = "failed"
        raise
    finally:
        progress.stop()
        trainer.save_model(str(folder / "model"), _internal_call=True)  # pushed below, when it is complete
        if main:
            summary = summarise()
            write_atomically(folder / "summary.json", json.dumps(summary, indent=2))
            write_verdicts(folder, trainer, task)
            trained_on.write(folder / "model")
            write_card()
            shutil.copyfile(folder / CARD_FILE, folder / "model" / CARD_FILE)
            if status == "finished" and trainer.hub_model_id is not None:
                say(console, push(folder / "model", trainer.hub_model_id, recipe.training))
            tell(summary, folder, console)
    return status == "finished"


def _checkpoint(recipe: Recipe, folder: Path) -> str | bool | None:
    """The trainer's `resume_from_checkpoint`: a checkpoint, or True for the last complete one, which it then names."""
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


def _method(training: TrollConfig) -> str:
    """The surrogate and the estimator in words, with the trust region's bound if there is one."""
    names = {
        "troll": f"TROLL, KL bound {training.kl_bound}",
        "regression": f"TROLL's regression term only, KL bound {training.kl_bound}",
        "kl_penalty": f"a KL penalty, weight {training.kl_penalty_weight}",
        "none": "no clip and no trust region",
    }
    surrogate = names.get(training.surrogate, f"surrogate {training.surrogate}")
    return surrogate if training.advantage_estimator == "group" else f"{surrogate}, {training.advantage_estimator}"


def model_path(recipe: Recipe) -> str:
    """The name or the folder of the recipe's model; an embedded model is made if the cache lacks it.

    Raises:
        RecipeError: If the recipe names no model, or an embedded model cannot be kept.
        troll.tasks.TaskError: If the embedded model cannot learn the task.
    """
    name = recipe.model.model_name_or_path
    if name is None:
        raise RecipeError("no model: name one with --model_name_or_path")
    if name not in EMBEDDED_MODELS:
        if recipe.task.warm_up:
            raise RecipeError(
                f"warm_up is how the model {EMBEDDED!r} learns the task before the run: leave it out for {name!r}"
            )
        return name
    try:
        return str(embedded_model(recipe.task, name, seed=recipe.training.seed))
    except OSError as error:
        raise RecipeError(f"the embedded model cannot be kept in the cache folder: {error}") from error


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


def _check_prompt(recipe: Recipe, processor: PreTrainedTokenizerBase | ProcessorMixin, task: Task) -> None:
    """Writes a prompt as TRL will, since some chat templates refuse some conversations."""
    prompt = task.eval_dataset.select_columns("prompt")[0]["prompt"]
    if isinstance(prompt, str) or "images" in task.eval_dataset.column_names:
        return
    try:
        processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **_template_variables(recipe))
    except (TemplateError, TypeError) as error:
        raise RecipeError(
            f"the model's chat template does not take the prompts of {task.name}: {one_line(error)}; check "
            "chat_template_kwargs, and the task option system_prompt"
        ) from error


def _template_variables(recipe: Recipe) -> dict[str, Any]:
    return dict(recipe.training.chat_template_kwargs or {})  # type: ignore[arg-type]  # a string was parsed


def _check_memory(
    recipe: Recipe,
    model_path: str,
    tasks: Sequence[Task],
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    console: Console,
) -> None:
    """Prints the memory that the run takes, and refuses a run that cannot fit on a GPU."""
    prompt = longest_prompt(tasks, processor, _template_variables(recipe))
    found = Plan(recipe, this_machine(recipe.training), model_path, prompt)
    main = recipe.training.process_index == 0
    try:
        lines = found.lines()
    except UnknownMemory as error:
        if main:
            warnings.warn(str(error), stacklevel=2)
        return
    if main:
        for line in lines:
            say(console, line)
    if found.fits:
        return
    if found.machine.on_gpu:
        raise RecipeError(found.remedy())
    if main:  # on a CPU this is only a warning, since RAM can be swapped
        warnings.warn(found.remedy(), stacklevel=2)


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
        raise _missing_model(model_path) from error


def _missing_model(model_path: str) -> RecipeError:
    if Path(model_path).exists():
        return RecipeError(f"{model_path} does not hold a model and a tokenizer that transformers can load")
    return RecipeError(
        f"cannot load the model {model_path!r}: there is no such folder, and the Hugging Face hub does not have it or "
        "cannot be reached; check the name and the network, or give a local folder with --model_name_or_path"
    )


def _trainer(
    recipe: Recipe, model_path: str, processor: PreTrainedTokenizerBase | ProcessorMixin, task: Task
) -> TrollTrainer:
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
        trainer = TrollTrainer(
            model_path,
            task.reward_funcs,
            training,
            train_dataset=task.train_dataset,
            eval_dataset=task.eval_dataset,
            processing_class=processor,
            peft_config=get_peft_config(model),
            quantization_config=get_quantization_config(model),
        )
    except SafetensorError as error:
        raise RecipeError(f"the weights of {model_path} cannot be read, {error}: fetch or save them anew") from error
    except OSError as error:
        raise _missing_model(model_path) from error
    except ValueError as error:  # TRL checks some settings only here
        raise RecipeError(one_line(error)) from error
    assert training.generation_batch_size is not None and training.num_generations is not None  # set by the parent
    wanted = training.generation_batch_size // training.num_generations
    if len(task.train_dataset) < wanted:  # TRL would drop the incomplete rollout, and end without a step
        raise RecipeError(
            f"a rollout takes {wanted} prompts (generation_batch_size / num_generations), and task {task.name} has "
            f"{len(task.train_dataset)} to train on: lower per_device_train_batch_size or updates_per_rollout, or "
            "raise num_generations"
        )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer
