"""`troll train`: one run, from a recipe to a folder with a model, its metrics and a report.

The run from top to bottom is `train_command`, `train` and `_train`; below are the trainer's callbacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from troll.files import json_text, read_json, write_atomically
from troll.trl.seam import micro_batches_done
from troll.trl.ungraded import NothingJudgedError
from troll_lab import recipes
from troll_lab.lock import locked
from troll_lab.recipes import Recipe, RecipeError
from troll_lab.runs.build import LOCK, BuiltRun, build
from troll_lab.runs.recorded import ANSWERS, HELD_OUT, SUCCESS, read_metrics
from troll_lab.runs.result import RunResult
from troll_lab.tasks import Task
from troll_lab.terminal import FAILED, INTERRUPTED, fail, say, silence_libraries
from troll_lab.trl import LabConfig, LabTrainer
from troll_lab.trl.eval_metrics import judged_by

#: The figures of the logs in the progress line: label, key, format.
SHOWN = (
    ("reward", "reward", "{:.2f}"),
    ("success", SUCCESS, "{:.0%}"),
    ("held-out", HELD_OUT, "{:.0%}"),
    ("KL", "trust_region/kl_before_mean", "{:.1e}"),
    ("of a completion", "trust_region/kl_target/measured", "{:.1e}"),
    ("wanted", "trust_region/kl_target/wanted", "{:.1e}"),
    ("rate", "trust_region/kl_target/rate", "{:.1e}"),
    ("projected", "trust_region/projected_fraction", "{:.1%}"),
    ("clipped", "clip_ratio/region_mean", "{:.1%}"),
)
_STOPPING = b"\ntroll: stopping at the end of the rollout, with a checkpoint; Ctrl-C again stops at once\n"


def train_command(recipe_name: str, overrides: Sequence[str]) -> int:
    """Trains by a recipe, given by name or path, with the fields that follow it on the command line.

    Returns:
        The exit code.

    Raises:
        troll_lab.terminal.UsageError: If the recipe cannot be followed.
    """
    silence_libraries()
    try:
        finished = train(recipes.load(recipe_name, overrides), Console())
    except (FloatingPointError, NothingJudgedError) as error:
        return fail(error, FAILED)
    return 0 if finished else INTERRUPTED


def train(recipe: Recipe, console: Console) -> bool:
    """Trains, and leaves a run folder.

    It holds `config.yaml`, `task.json`, `metrics.jsonl`, `answers.jsonl`, `summary.json`, `verdicts.json`, `README.md`,
    `report.html`, the `model` and checkpoints. Every mistake in a recipe is found before the first step.

    Returns:
        Whether training reached its end. Ctrl-C ends it after the rollout, and a second one at once, which leaves the
        last checkpoint. The folder is just as complete, and can be resumed if there is a checkpoint.

    Raises:
        RecipeError: If another process trains in the folder; and see `troll_lab.runs.build.build`.
        FloatingPointError: If logits become NaN or infinite; the folder is as complete as after Ctrl-C.
        NothingJudgedError: If a grader could judge nothing in three rollouts in a row; the folder is as complete.
        troll_lab.tasks.TaskError: See `troll_lab.runs.build.build`.
    """
    folder, holder = Path(recipe.training.output_dir or "trainer_output"), "another troll train"
    main = recipe.training.process_index == 0
    with locked(folder, LOCK, holder=holder, error=RecipeError) if main else contextlib.nullcontext():
        return _train(build(recipe, folder), console)


def _train(run: BuiltRun, console: Console) -> bool:
    recipe, trainer, folder = run.recipe, run.trainer, run.folder
    if trainer.is_world_process_zero():
        if run.checkpoint is None:
            recipes.save(recipe, folder / recipes.CONFIG_FILE)
        run.trained_on.write(folder)
        say(console, f"training on {run.task.name} with {_method(recipe.training)}; output in {folder}")
        if recipe.note:
            say(console, recipe.note)

    progress = ProgressLine(console)
    trainer.add_callback(RunFiles(run))
    trainer.add_callback(progress)
    if run.others:
        trainer.add_callback(OtherTasks(trainer, run.others))

    stop = StopAfterRollout(trainer)
    trainer.callback_handler.callbacks.insert(0, stop)
    result = RunResult(run)
    # TRL would write its own card, without the task and results, with every checkpoint and before every push.
    trainer.create_model_card = result.write_card  # type: ignore[method-assign]
    status, returned = "failed", False
    try:
        with stop.listening():
            trainer.train(resume_from_checkpoint=run.checkpoint)
        returned = True
        status = "interrupted" if stop.stopped else "finished"
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        progress.stop()
        # A resumed run that fails before its checkpoint is loaded leaves the folder as it was.
        if run.checkpoint is None or trainer.state.global_step:
            result.write(status, returned, console)
    # Without this, the process group ends with the interpreter, and its threads may abort the process.
    trainer.accelerator.end_training()
    return status == "finished"


def _method(training: LabConfig) -> str:
    """The surrogate and the estimator in words, with the trust region's bound and the KL target if there are any."""
    names = {
        "troll": f"TROLL, KL bound {training.kl_bound}",
        "regression": f"TROLL's regression term only, KL bound {training.kl_bound}",
        "none": "no clip and no trust region",
    }
    surrogate = names.get(training.surrogate, f"surrogate {training.surrogate}")
    if training.surrogate == "kl_penalty":
        surrogate = f"a KL penalty, weight {training.own_settings.weight}"
    if training.kl_target is not None:
        surrogate += f", KL target {training.kl_target}"
    return surrogate if training.advantage_estimator == "group" else f"{surrogate}, {training.advantage_estimator}"


class RunFiles(TrainerCallback):
    """Writes every log as a line of `metrics.jsonl` at once, and keeps the training task with every checkpoint.

    Some answers of every evaluation go to `answers.jsonl`, one evaluation a line. A resumed run continues both files
    after its checkpoint.
    """

    def __init__(self, run: BuiltRun) -> None:
        self.path, self.task, self.recipe = run.folder / "metrics.jsonl", run.trained_on, run.recipe
        self.answers, self.eval_metrics = run.folder / ANSWERS, run.trainer.eval_metrics

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the files with what the checkpoint had; for a new run, they are empty.

        From here on, the settings of a resumed run are the new ones, and its former results no longer are its own.
        """
        if state.is_world_process_zero:
            folder, resumed = self.path.parent, state.global_step > 0
            if resumed:
                recipes.save(self.recipe, folder / recipes.CONFIG_FILE)
            if resumed and (summary := folder / "summary.json").is_file():
                write_atomically(summary, json_text({**read_json(summary), "status": "unfinished"}, indent=2))
            write_atomically(self.path, "".join(_line(logs) for logs in state.log_history))
            known = read_metrics(self.answers) if resumed and self.answers.is_file() else []
            kept = [row for row in known if row["step"] <= state.global_step]
            write_atomically(self.answers, "".join(map(_line, kept)))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Appends the newest log."""
        if state.is_world_process_zero and "train_runtime" not in state.log_history[-1]:
            with self.path.open("a") as file:
                file.write(_line(state.log_history[-1]))

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Appends answers of an evaluation on the task that is trained on."""
        if state.is_world_process_zero and "eval_runtime" in kwargs["metrics"]:
            row = {"step": state.global_step, "answers": [asdict(each) for each in self.eval_metrics.answers]}
            with self.answers.open("a") as file:
                file.write(_line(row))

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes `task.json` into the checkpoint."""
        if state.is_world_process_zero:
            self.task.write(Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))


class ProgressLine(TrainerCallback):
    """A progress bar with the figures of `SHOWN`; on anything but a terminal, a line per log."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("train"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self.latest: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the bar at the run's first step."""
        self.bar = self.progress.add_task("", total=state.max_steps, completed=state.global_step)
        if state.is_world_process_zero and self.console.is_terminal:
            self.progress.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Moves the bar."""
        self.progress.update(self.bar, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Shows the newest figures."""
        logs = state.log_history[-1]
        shown = {label: shape.format(logs[key]) for label, key, shape in SHOWN if logs.get(key) is not None}
        self.latest |= shown
        self.progress.update(self.bar, description=_figures(self.latest))
        # Only new figures: a step with training and evaluation has two logs, and the second must not repeat the first.
        if state.is_world_process_zero and not self.console.is_terminal and shown:
            self.console.print(f"step {state.global_step}/{state.max_steps}  {_figures(shown)}", soft_wrap=True)

    def stop(self) -> None:
        """Ends the bar."""
        if self.progress.live.is_started:
            self.progress.stop()


class OtherTasks(TrainerCallback):
    """Evaluates on other tasks, right after every evaluation on the task that is trained on.

    Args:
        trainer: The trainer that evaluates.
        tasks: The other tasks, with different `short_name`.
    """

    def __init__(self, trainer: LabTrainer, tasks: Sequence[Task]) -> None:
        self.trainer, self.tasks = trainer, tasks

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs the metrics of each, judged by its own rewards, under `eval_<short name>_...`."""
        if "eval_runtime" in kwargs["metrics"]:
            for task in self.tasks:
                with judged_by(self.trainer, task.reward_funcs, task.reward_weights):
                    self.trainer.evaluate(task.eval_dataset, metric_key_prefix=f"eval_{task.short_name}")


class StopAfterRollout(TrainerCallback):
    """Ends a training that was interrupted by Ctrl-C where a resumed run repeats an uninterrupted one bit for bit.

    In the middle of a rollout, a checkpoint would lack the rollout's completions.

    Args:
        trainer: The trainer. Its other callbacks run after this one, and so log what they have of the last updates.

    Attributes:
        stopped: Whether it has ended the training before its last step.
    """

    def __init__(self, trainer: LabTrainer) -> None:
        self._trainer, self._asked, self.stopped = trainer, False, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the first Ctrl-C within the context; the second raises KeyboardInterrupt, as without it.

        Does nothing outside the main thread, the only one to get signals, or if SIGINT has another handler already.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            # The signal may have interrupted `print`, which cannot be called again before it returns.
            os.write(2, _STOPPING)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves and ends the training if a rollout has had all its updates; every process has to agree."""
        trainer = self._trainer
        if micro_batches_done(trainer) % trainer.args.rollout_steps or state.global_step >= state.max_steps:
            return
        asked = torch.tensor([self._asked], device=trainer.accelerator.device)
        if trainer.accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True


def _figures(shown: Mapping[str, str]) -> str:
    return "  ".join(f"{label} {value}" for label, value in shown.items())


def _line(logs: dict[str, Any]) -> str:
    return json_text(logs) + "\n"
