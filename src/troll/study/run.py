"""One training run, from a recipe to a folder with a model, its metrics and a report."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoProcessor, PreTrainedTokenizerBase, PrinterCallback, ProcessorMixin, ProgressCallback
from trl import get_peft_config, get_quantization_config

from troll import recipes
from troll.evaluation.training_task import TrainingTask
from troll.files import write_atomically
from troll.recipes import Recipe, RecipeError
from troll.run_folder import read_settings
from troll.study.callbacks import MetricsFile, OtherTasks, ProgressLine, TaskFile
from troll.study.card import CARD_FILE, model_card
from troll.study.embedded import embedded_model
from troll.study.memory import UnknownMemory
from troll.study.metrics import SUCCESS
from troll.study.plan import longest_prompt, machine_of_run, plan
from troll.study.publishing import check_back_ends, check_hub, push
from troll.study.report import write_report
from troll.study.small_model import EMBEDDED, EMBEDDED_MODELS
from troll.tasks import Task, load_task
from troll.tasks.apart import keep_apart
from troll.terminal import one_line, say
from troll.trl import TrollConfig, TrollTrainer
from troll.trl.checkpoints import check_complete, last_checkpoint, newest_complete
from troll.trl.surrogates import SURROGATES

# What a resumed run may change, with what starts like one of these: how long it goes on, and what it leaves behind.
_MAY_CHANGE = {"max_steps", "num_train_epochs", "output_dir", "report_to", "run_name"}
_MAY_CHANGE_PREFIXES = ("save_", "logging_", "eval_")
_DECIDES_THE_DATA = {"eval_size", "eval_tasks"}  # what is held out is not trained on


def train(recipe: Recipe, console: Console) -> bool:
    """Trains, and leaves a run folder.

    It holds `config.yaml`, `task.json`, `metrics.jsonl`, `summary.json`, `README.md`, `report.html`, the `model` and
    checkpoints. Everything that can be wrong with a recipe is found before the first step.

    Args:
        recipe: From :func:`troll.recipes.load`.
        console: Where progress and results are printed.

    Returns:
        Whether training reached its end; Ctrl-C leaves a folder that is as complete, and can be resumed.

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
    # One process first: the others find the cached model.
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

    # A resumed run has its first evaluation in the checkpoint's log, and another would use up random numbers.
    trainer.args.eval_on_start = trainer.args.eval_on_start and checkpoint is None
    start, status = time.monotonic(), "unfinished"

    def summarise() -> dict[str, Any]:
        return _summary(recipe, trainer, status, time.monotonic() - start, len(task.eval_dataset))

    def write_card(*_: Any, **__: Any) -> None:
        if main:
            name = trainer.hub_model_id or str(folder / "model")
            write_atomically(folder / CARD_FILE, model_card(recipe, task, trained_on, summarise(), name))

    # TRL writes its own, which knows nothing of the run, with every checkpoint and before every push.
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
            _write_verdicts(folder, trainer, task)
            trained_on.write(folder / "model")
            write_card()
            shutil.copyfile(folder / CARD_FILE, folder / "model" / CARD_FILE)
            if status == "finished" and trainer.hub_model_id is not None:
                say(console, push(folder / "model", trainer.hub_model_id, recipe.training))
            _tell(summary, folder, console)
    return status == "finished"


def _checkpoint(recipe: Recipe, folder: Path) -> str | bool | None:
    """What the trainer is told to resume from; True is the last complete one, which it says."""
    resume = recipe.training.resume_from_checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (last, _), empty = newest_complete(folder), not any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"output_dir {folder} cannot be used: {error.strerror}") from error
    if not resume:
        if not empty:
            or_resume = ", or go on from its last checkpoint with --resume_from_checkpoint" if last else ""
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
    """Refuses a folder that holds a run with other settings; one without a ``config.yaml`` holds none.

    Args:
        settings: From :func:`troll.recipes.plain`.
        folder: The run's.
        may_change: Of which fields a difference does not count.

    Raises:
        RecipeError: Names the first field that differs, with both values.
    """
    config = folder / recipes.CONFIG_FILE
    if not config.is_file():
        return
    try:
        found = recipes.differences(read_settings(config), settings, may_change)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if found:
        raise RecipeError(
            f"{folder} holds a run with other settings: {found[0]}; go on with the same, or choose another folder with "
            "--output_dir"
        )


def _may_change(name: str) -> bool:
    return name in _MAY_CHANGE or (name.startswith(_MAY_CHANGE_PREFIXES) and name not in _DECIDES_THE_DATA)


def _method(training: TrollConfig) -> str:
    """The surrogate and the estimator, with the trust region's bound where there is one."""
    names = {
        "troll": f"TROLL, KL bound {training.kl_bound}",
        "regression": f"TROLL's regression term only, KL bound {training.kl_bound}",
        "kl_penalty": f"a KL penalty, weight {training.kl_penalty_weight}",
        "none": "no clip and no trust region",
    }
    surrogate = names.get(training.surrogate, f"surrogate {training.surrogate}")
    return surrogate if training.advantage_estimator == "group" else f"{surrogate}, {training.advantage_estimator}"


def model_path(recipe: Recipe) -> str:
    """The name or folder of the recipe's model; the embedded one is made if the cache lacks it.

    Raises:
        RecipeError: If the recipe names none, or the embedded one cannot be kept.
        troll.tasks.TaskError: If the embedded model cannot learn the task.
    """
    name = recipe.model.model_name_or_path
    if name is None:
        raise RecipeError("no model: name one with --model_name_or_path")
    if name not in EMBEDDED_MODELS:
        if recipe.task.warm_up:
            raise RecipeError(
                f"warm_up is how the model {EMBEDDED!r} learns the task before: leave it out for {name!r}"
            )
        return name
    try:
        return str(embedded_model(recipe.task, name, seed=recipe.training.seed))
    except OSError as error:
        raise RecipeError(f"the embedded model cannot be kept in the cache folder: {error}") from error


def _tasks(recipe: Recipe, conversational: bool) -> tuple[Task, list[Task]]:
    """The task to train on, and the others that the model is judged on."""
    if recipe.task.eval_tasks and recipe.training.dataloader_persistent_workers:
        raise RecipeError(
            "eval_tasks and dataloader_persistent_workers exclude each other: transformers keeps the workers of one "
            "data set, and would evaluate on it again; leave one of them out"
        )
    task = load_task(recipe.task, conversational=conversational, for_training=True)
    others = [load_task(config, conversational=conversational) for config in recipe.task.other_tasks()]
    return (keep_apart(task, others) if others else task), others


def _check_prompt(recipe: Recipe, processor: PreTrainedTokenizerBase | ProcessorMixin, task: Task) -> None:
    """Writes a prompt as TRL will: some chat templates refuse some conversations."""
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
    """Says what the run takes, and refuses what cannot fit on a GPU."""
    prompt = longest_prompt(tasks, processor, _template_variables(recipe))
    found = plan(recipe, machine_of_run(recipe.training), model_path, prompt)
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
    if main:  # RAM can be swapped
        warnings.warn(found.remedy(), stacklevel=2)


def _processor(recipe: Recipe, model_path: str) -> PreTrainedTokenizerBase | ProcessorMixin:
    """A tokenizer; of a vision-language model, its processor."""
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
    # As TRL's own script does; a string was parsed by the configuration.
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
    if len(task.train_dataset) < wanted:  # TRL would leave the incomplete rollout out, and end without a step
        raise RecipeError(
            f"a rollout takes {wanted} prompts (generation_batch_size / num_generations), and task {task.name} has "
            f"{len(task.train_dataset)} to train on: lower per_device_train_batch_size or updates_per_rollout, or "
            "raise num_generations"
        )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


def _summary(recipe: Recipe, trainer: TrollTrainer, status: str, seconds: float, eval_size: int) -> dict[str, Any]:
    training, steps = recipe.training, trainer.state.global_step
    held_out = [logs for logs in trainer.state.log_history if "eval_reward" in logs]
    first, last = (held_out[0], held_out[-1]) if held_out else ({}, {})
    before, after = first if first.get("step") == 0 else {}, last if last.get("step", 0) > 0 else {}
    passes = steps * training.gradient_accumulation_steps
    logged = [logs for logs in trainer.state.log_history if "step_time" in logs]
    return {
        "status": status,
        "recipe": recipe.name,
        "task": recipe.task.task,
        "model": recipe.model.model_name_or_path,
        "surrogate": training.surrogate,
        "surrogate_settings": {name: getattr(training, name) for name in SURROGATES[training.surrogate].settings},
        "surrogate_sets": dict(SURROGATES[training.surrogate].sets),
        "advantage_estimator": training.advantage_estimator,
        "kl_bound": training.kl_bound,
        "steps": steps,
        "rollouts": -(-passes // training.rollout_steps),
        "updates_per_rollout": training.rollout_steps // training.gradient_accumulation_steps,
        "seconds": round(seconds, 1),
        # Of the run as a whole, also where it was resumed: without evaluation and checkpoints.
        "training_seconds": round(_training_seconds(logged), 1),
        "entropy_after": logged[-1].get("entropy") if logged else None,
        "success_before": before.get(f"eval_{SUCCESS}"),
        "success_after": after.get(f"eval_{SUCCESS}"),
        "success_after_step": last.get("step"),
        "reward_before": before.get("eval_reward"),
        "reward_after": after.get("eval_reward"),
        "eval_size": eval_size,
        "seed": training.seed,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("troll-rl", "torch", "trl", "transformers")},
        "machine": _machine(),
    }


def _write_verdicts(folder: Path, trainer: TrollTrainer, task: Task) -> None:
    """Writes ``verdicts.json``: of the last evaluation, its step, and of each completion the question and the success.

    The success is null where the completion could not be judged. A question is the number of the first held-out prompt
    that reads the same. Nothing is written where the task cannot tell success from failure, or no evaluation was
    completed.
    """
    steps = [logs["step"] for logs in trainer.state.log_history if f"eval_{SUCCESS}" in logs]
    samples = trainer.num_generations_eval or 1
    successes = trainer.held_out.successes[: len(task.eval_dataset) * samples]
    if not steps or len(successes) < len(task.eval_dataset) * samples:
        return
    first: dict[str, int] = {}
    prompts = [json.dumps(prompt) for prompt in task.eval_dataset.select_columns("prompt")["prompt"]]
    numbers = [first.setdefault(prompt, number) for number, prompt in enumerate(prompts)]
    verdicts = {
        "step": steps[-1],
        "question": [number for number in numbers for _ in range(samples)],
        "success": [None if success is None else int(success) for success in successes],
    }
    write_atomically(folder / "verdicts.json", json.dumps(verdicts) + "\n")


def _training_seconds(logged: Sequence[dict[str, Any]]) -> float:
    """Time in optimiser steps: TRL logs their mean since the log before."""
    ends = [0, *(logs["step"] for logs in logged)]
    return sum(logs["step_time"] * (end - start) for logs, start, end in zip(logged, ends, ends[1:], strict=False))


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _tell(summary: dict[str, Any], folder: Path, console: Console) -> None:
    before, after = summary["success_before"], summary["success_after"]
    if before is not None and after is not None:
        say(
            console,
            f"held-out success {before:.1%} -> {after:.1%} ({100 * (after - before):+.1f} points, "
            f"{summary['eval_size']} answers, step {summary['success_after_step']})",
        )
    elif summary["reward_before"] is not None and summary["reward_after"] is not None:
        say(console, f"held-out reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f}")
    say(console, f"time    {summary['seconds']:.0f} s to step {summary['steps']}")
    say(console, f"model   {folder / 'model'}")
    try:
        say(console, f"report  {write_report(folder)}")
    except ImportError as error:
        say(console, f"no report: {error}")
    if summary["status"] != "finished":
        resume = "go on with the same command and --resume_from_checkpoint"
        last, _ = newest_complete(folder)
        how = resume if last else "there is no complete checkpoint yet to resume from"
        say(console, f"{summary['status']} at step {summary['steps']}; {how}")
