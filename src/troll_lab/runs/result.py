"""The end of a run: its model, summary, verdicts and card, and the last lines on the console."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import troll
import troll_lab
import troll_sandbox
from troll.files import json_text, read_json, write_atomically
from troll.trl.surrogates import SURROGATES, settings_read
from troll_lab.runs.build import BuiltRun
from troll_lab.runs.publishing import CARD_FILE, model_card, push
from troll_lab.runs.recorded import HELD_OUT
from troll_lab.runs.text import duration, problems
from troll_lab.tasks import Task
from troll_lab.tasks.registry import about
from troll_lab.terminal import say
from troll_lab.trl import LabTrainer
from troll_lab.trl.checkpoints import newest_complete
from troll_lab.trl.seam import evaluation_order


class RunResult:
    """Writes the files at the end of a run, even if it fails or is interrupted.

    The time of the run starts when this object is made.

    Args:
        run: The run. Every process makes its result; only the main one writes it.
    """

    def __init__(self, run: BuiltRun) -> None:
        self._run, self._status, self._returned = run, "unfinished", False
        self._start, self._commit = time.monotonic(), own_commit()

    def write(self, status: str, returned: bool, console: Console) -> None:
        """Saves the model, writes all files, and prints the outcome.

        Args:
            status: "finished", "interrupted" or "failed".
            returned: Whether `train` of the trainer returned, at the end or after Ctrl-C: only then has it loaded the
                best model, if it should.
            console: Where to print.
        """
        self._status, self._returned = status, returned
        run, trainer, folder = self._run, self._run.trainer, self._run.folder
        trainer.save_model(str(folder / "model"), _internal_call=True)  # pushed below, when it is complete
        if not trainer.is_world_process_zero():
            return
        summary = self._summary()
        write_atomically(folder / "summary.json", json_text(summary, indent=2))
        _write_verdicts(folder, trainer, run.task, summary["success_after_step"])
        run.trained_on.write(folder / "model")
        report = _write_report(folder)
        self.write_card()
        shutil.copyfile(folder / CARD_FILE, folder / "model" / CARD_FILE)
        if status == "finished" and trainer.hub_model_id is not None:
            say(console, push(folder / "model", trainer.hub_model_id, run.recipe.training))
        _print_outcome(summary, folder, report, console)

    def write_card(self, *_: Any, **__: Any) -> None:
        """Writes the model card; takes the arguments of TRL's `create_model_card`, which it replaces."""
        run = self._run
        if run.trainer.is_world_process_zero():
            name = run.trainer.hub_model_id or str(run.folder / "model")
            card = model_card(run.recipe, run.task, run.trained_on, self._summary(), name)
            write_atomically(run.folder / CARD_FILE, card)

    def _summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        recipe, training, state = self._run.recipe, self._run.recipe.training, self._run.trainer.state
        held_out = [logs for logs in state.log_history if "eval_reward" in logs]
        first, last = (held_out[0], held_out[-1]) if held_out else ({}, {})
        if self._returned and training.load_best_model_at_end and state.best_model_checkpoint:
            # The weights that were loaded. `best_global_step` may be an evaluation without a checkpoint.
            step = int(state.best_model_checkpoint.rpartition("-")[2])
            last = next(logs for logs in held_out if logs["step"] == step)
        before, after = first if first.get("step") == 0 else {}, last if last.get("step", 0) > 0 else {}
        logged = [logs for logs in state.log_history if "step_time" in logs]
        passes, read = state.global_step * training.gradient_accumulation_steps, settings_read(training)
        return {
            "status": self._status,
            "recipe": recipe.name,
            "task": recipe.task.task,
            "task_about": about(recipe.task.task),
            "model": recipe.model.model_name_or_path,
            "surrogate": training.surrogate,
            "surrogate_settings": read,
            "surrogate_sets": dict(SURROGATES[training.surrogate].sets),
            "advantage_estimator": training.advantage_estimator,
            "kl_bound": read.get("kl_bound"),
            "steps": state.global_step,
            "rollouts": -(-passes // training.rollout_steps),
            "updates_per_rollout": training.rollout_steps // training.gradient_accumulation_steps,
            "seconds": round(time.monotonic() - self._start, 1),
            # Of the whole run, even if it was resumed, without evaluations and checkpoints.
            "training_seconds": round(_training_seconds(logged), 1),
            "entropy_after": logged[-1].get("entropy") if logged else None,
            "success_before": before.get(HELD_OUT),
            "success_after": after.get(HELD_OUT),
            "success_after_step": last.get("step"),
            "reward_before": before.get("eval_reward"),
            "reward_after": after.get("eval_reward"),
            "eval_size": len(self._run.task.eval_dataset),
            "eval_questions": len(set(_questions(self._run.task))),
            "seed": training.seed,
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("troll-rl", "torch", "trl", "transformers")},
            "commit": self._commit,
            "machine": _machine(),
        }


def _write_verdicts(folder: Path, trainer: LabTrainer, task: Task, step: int | None) -> None:
    """Writes `verdicts.json`: the step of the last evaluation, and the row and success of each completion.

    Completions are in the order of the evaluation, which TRL shuffles. The success is null if the completion could not
    be judged. Nothing is written if the task does not define success, or this process did not complete its last
    evaluation, or the saved weights are those of an earlier `step`; a file about other weights is then deleted.
    """
    path = folder / "verdicts.json"
    steps = [logs["step"] for logs in trainer.state.log_history if HELD_OUT in logs]
    samples = trainer.num_generations_eval or 1
    successes = trainer.eval_metrics.successes[: len(task.eval_dataset) * samples]
    if not steps or steps[-1] != step or len(successes) < len(task.eval_dataset) * samples:
        if path.is_file() and read_json(path).get("step") != step:
            path.unlink()
        return
    verdicts = {
        "step": steps[-1],
        "question": _questions(task),
        "row": evaluation_order(trainer, task.eval_dataset),
        "success": [None if success is None else int(success) for success in successes],
    }
    write_atomically(path, json_text(verdicts) + "\n")


def _questions(task: Task) -> list[int]:
    """The question of each held-out row: the number of the first row with the same prompt."""
    if "images" in task.eval_dataset.column_names:  # many diagrams share a text
        return list(range(len(task.eval_dataset)))
    first: dict[str, int] = {}
    prompts = [json.dumps(prompt) for prompt in task.eval_dataset.select_columns("prompt")["prompt"]]
    return [first.setdefault(prompt, number) for number, prompt in enumerate(prompts)]


def _training_seconds(logged: Sequence[dict[str, Any]]) -> float:
    """The seconds in optimiser steps: TRL logs their mean since the last log."""
    ends = [0, *(logs["step"] for logs in logged)]
    return sum(logs["step_time"] * (end - start) for logs, start, end in zip(logged, ends, ends[1:], strict=False))


@cache
def own_commit() -> str | None:
    """The commit of the code that runs: call it before a checkout may change under a process."""
    return commit_of(*(Path(package.__path__[0]) for package in (troll_lab, troll, troll_sandbox)))


def commit_of(package: Path, *others: Path) -> str | None:
    """The commit of the checkout that contains packages, with a `+` if files of one of them have changed since.

    None for a package that is only installed inside a checkout, or without git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--", ".", *map(str, others))
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _write_report(folder: Path) -> str:
    """Writes the report of a run, and returns a line to print: where it is, or why there is none."""
    try:
        from troll_lab.reports.run_page import write_report

        return f"report  {write_report(folder)}"
    except ImportError as error:
        return f"no report: {error}"


def _print_outcome(summary: Mapping[str, Any], folder: Path, report: str, console: Console) -> None:
    """Prints the outcome of a run and where its files are."""
    before, after = summary["success_before"], summary["success_after"]
    if before is not None and after is not None:
        gain = f"{100 * (after - before):+.1f} points"
        of = f"{problems(summary['eval_size'], summary['eval_questions'])}; step {summary['success_after_step']}"
        say(console, f"held-out success {before:.1%} -> {after:.1%} ({gain}, {of})")
    elif summary["reward_before"] is not None and summary["reward_after"] is not None:
        say(console, f"held-out reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f}")
    # The report's time: of a resumed run, the seconds of this command would be only a part.
    say(console, f"time    {duration(summary['training_seconds'])} in training, {summary['steps']} steps")
    say(console, f"model   {folder / 'model'}")
    say(console, report)
    if summary["status"] != "finished":
        how = "it has no complete checkpoint yet to resume from"
        if newest_complete(folder)[0] is not None:
            how = "resume with the same command and --resume_from_checkpoint"
        say(console, f"{summary['status']} at step {summary['steps']}; {how}")
