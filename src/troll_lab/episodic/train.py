"""A run on movements, from its settings to a folder with metrics, a checkpoint, a summary and a page."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from troll.files import json_text, read_json, write_atomically
from troll_lab.episodic.config import CONFIG, METRICS, PATHS, SUMMARY, EpisodicConfig, load
from troll_lab.episodic.environments import make_task
from troll_lab.episodic.learner import Learner
from troll_lab.episodic.policy import sample
from troll_lab.episodic.prodmp import ProDMP
from troll_lab.episodic.rollout import Rollout, collect, make_environments
from troll_lab.evaluation.estimators import wilson_interval
from troll_lab.lock import ANOTHER_FOLDER, locked
from troll_lab.runs.recorded import read_metrics
from troll_lab.runs.statistics import t_interval
from troll_lab.terminal import FAILED, INTERRUPTED, UsageError, fail, say
from troll_lab.values import read_yaml, yaml_text

CHECKPOINT = "checkpoint.pt"
#: Settings that a resumed run may change.
_MAY_CHANGE = ("iterations", "output_dir", "processes")
#: The users of random numbers, each with its own stream.
_EPISODES, _MOVEMENTS, _EVALUATION = range(3)
#: The number of episodes whose paths are drawn.
_PICTURED = 12

Choose = Callable[[Tensor], Tensor]


def train_command(recipe_name: str, overrides: list[str]) -> int:
    """`troll train` with a recipe of movements.

    Args:
        recipe_name: The recipe's name, or the path of its file.
        overrides: The fields after the recipe on the command line.

    Returns:
        The exit code.

    Raises:
        UsageError: If a setting or the folder cannot be used.
    """
    try:
        return 0 if train(load(recipe_name, overrides), Console()) else INTERRUPTED
    except FloatingPointError as error:
        return fail(error, FAILED)
    except ValueError as error:
        raise UsageError(str(error)) from error


def train(config: EpisodicConfig, console: Console) -> bool:
    """Trains, and leaves a folder.

    It holds `config.yaml`, `metrics.jsonl`, `checkpoint.pt`, `summary.json`, `paths.json` and `report.html`. A resumed
    run gives the same numbers as one that was never interrupted: a checkpoint follows each iteration, which has random
    numbers of its own.

    Args:
        config: The settings.
        console: The console for progress and results.

    Returns:
        Whether training reached its end. Ctrl-C leaves a folder that is just as complete and can be resumed.

    Raises:
        ValueError: If a setting or the folder cannot be used.
        FloatingPointError: If a loss becomes NaN or infinite, or the policy diverges.
    """
    folder = Path(config.output_dir)
    with locked(
        folder,
        ".lock",
        marker=CONFIG,
        content="run on movements",
        holder="another training",
        error=ValueError,
    ):
        return _Run(config, folder, console).train()


class _Run:
    def __init__(self, config: EpisodicConfig, folder: Path, console: Console) -> None:
        self.config, self.folder, self.console = config, folder, console
        _check_folder(config, folder)
        self.task = make_task(config.environment)
        if config.events == "segments" and not 2 <= config.segment_points <= self.task.num_steps:
            raise ValueError(
                f"segment_points must be from 2 to the number of steps {self.task.num_steps}, "
                f"got {config.segment_points}"
            )
        self.primitive = ProDMP(config.num_bases, self.task.num_steps, self.task.time_step, config.alpha)
        self.environments = make_environments(self.task, config.num_envs, config.processes)
        first, _ = self.environments.reset(seed=0)
        joints = self.task.start(first)[0].shape[1]
        self.learner = Learner(config, self.primitive, first.shape[1], joints)
        self.rows: list[dict[str, Any]] = []
        self.done, self.seconds = -1, 0.0
        if config.resume_from_checkpoint:
            saved = torch.load(folder / CHECKPOINT)
            self.learner.restore(saved["learner"])
            self.done, self.seconds = saved["iterations"], saved["seconds"]
            # A crash may have come between the metrics of an iteration and its checkpoint.
            self.rows = [row for row in read_metrics(folder / METRICS) if row["step"] <= self.done]
        write_atomically(folder / CONFIG, yaml_text(config.settings()))
        write_atomically(folder / METRICS, "".join(map(_line, self.rows)))

    def train(self) -> bool:
        """Runs the remaining iterations."""
        config, status = self.config, "failed"
        say(self.console, f"training {config.environment} by {_method(config)}; output in {self.folder}")
        columns = (TextColumn("train"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
        progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        bar = progress.add_task("", total=config.iterations, completed=max(0, self.done))
        on_terminal = self.console.is_terminal
        started = time.monotonic() - self.seconds
        try:
            with contextlib.closing(self.environments), progress if on_terminal else contextlib.nullcontext():
                while self.done < config.iterations:
                    row = self._iterate(self.done + 1)
                    self.seconds = time.monotonic() - started
                    self._record(row)
                    progress.update(bar, completed=self.done, description=_figures(row))
                    if not on_terminal and "eval_success" in row:
                        say(self.console, f"iteration {self.done}/{config.iterations}: {_figures(row)}")
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            summary = self._summary(status)
            write_atomically(self.folder / SUMMARY, json_text(summary, indent=2))
        if self.rows:
            from troll_lab.reports.movements_page import write_report

            say(self.console, f"report: {write_report(self.folder)}")
        return status == "finished"

    def _iterate(self, iteration: int) -> dict[str, Any]:
        """The metrics of a rollout and the updates that follow; iteration 0 is an evaluation only."""
        config = self.config
        row: dict[str, Any] = {
            "step": iteration,
            "environment_steps": iteration * config.episodes * self.task.num_steps,
        }
        if iteration > 0:
            movements = torch.Generator().manual_seed(_seeds(config.seed, _MOVEMENTS, iteration, 1)[0])
            rollout = self._collect(
                lambda contexts: sample(self.learner.policy(contexts), movements),
                _seeds(config.seed, _EPISODES, iteration, config.episodes),
            )
            row["return"] = rollout.rewards.sum(-1).mean().item()
            row["success"] = rollout.success.double().mean().item()
            row |= self.learner.update(rollout, movements)
        if iteration % config.eval_every == 0 or iteration == config.iterations:
            row |= self._evaluate()
        return row

    def _evaluate(self) -> dict[str, Any]:
        """Return and success of the mean movements in fixed held-out episodes, with 95 % intervals."""
        with torch.no_grad():
            rollout = self._collect(
                lambda contexts: self.learner.policy(contexts).mean,
                _seeds(self.config.seed, _EVALUATION, 0, self.config.eval_episodes),
                held_out=True,
            )
        self._write_paths(rollout)
        returns, success = rollout.rewards.sum(-1).tolist(), rollout.success.double().mean().item()
        return {
            "eval_return": sum(returns) / len(returns),
            "eval_return_interval": t_interval(returns),
            "eval_success": success,
            "eval_success_interval": wilson_interval(success, len(returns)),
        }

    def _collect(self, choose: Choose, seeds: list[int], held_out: bool = False) -> Rollout:
        return collect(self.task, self.environments, self.primitive, choose, seeds, held_out)

    def _write_paths(self, rollout: Rollout) -> None:
        """Saves the paths of a few evaluation episodes: those of the first evaluation, and of the latest."""
        file, few = self.folder / PATHS, rollout.observations[:_PICTURED]
        paths = few[:, :, self.task.moving].tolist()
        kept = read_json(file) if self.done >= 0 else {"before": paths, "target": few[:, 0, self.task.target].tolist()}
        write_atomically(file, json_text(kept | {"after": paths}))

    def _record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with (self.folder / METRICS).open("a") as file:
            file.write(_line(row))
        self.done = row["step"]
        checkpoint = self.folder / CHECKPOINT
        unfinished = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}")
        torch.save({"learner": self.learner.state(), "iterations": self.done, "seconds": self.seconds}, unfinished)
        os.replace(unfinished, checkpoint)

    def _summary(self, status: str) -> dict[str, Any]:
        evaluated = [row for row in self.rows if "eval_success" in row]
        first, last = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
        return {
            "status": status,
            "environment": self.config.environment,
            "method": _method(self.config),
            "iterations": max(0, self.done),
            "environment_steps": self.rows[-1]["environment_steps"] if self.rows else 0,
            "seconds": round(self.seconds, 1),
            "success_before": first.get("eval_success"),
            "success_after": last.get("eval_success"),
            "success_interval": last.get("eval_success_interval"),
            "return_before": first.get("eval_return"),
            "return_after": last.get("eval_return"),
            "return_interval": last.get("eval_return_interval"),
            "eval_size": self.config.eval_episodes,
            "seed": self.config.seed,
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("troll-rl", "torch", "gymnasium", "mujoco")},
        }


def _check_folder(config: EpisodicConfig, folder: Path) -> None:
    """Refuses a folder that is not new, or, to resume, that does not hold this run."""
    if not config.resume_from_checkpoint:
        if (folder / CHECKPOINT).is_file():
            raise ValueError(
                f"output_dir {folder} holds a run: choose another with --output_dir, or continue it with "
                "--resume_from_checkpoint"
            )
        # Runs of language models have the marker too.
        if (folder / CONFIG).is_file() and "environment" not in read_yaml(folder / CONFIG):
            raise ValueError(f"output_dir {folder} is not empty and holds no run on movements: {ANOTHER_FOLDER}")
        return
    if not (folder / CHECKPOINT).is_file():
        raise ValueError(f"resume_from_checkpoint: {folder} has no {CHECKPOINT}")
    before = read_yaml(folder / CONFIG)
    for name, value in config.settings().items():
        if name not in _MAY_CHANGE and before.get(name) != value:
            raise ValueError(
                f"{folder} holds a run with other settings: {name} is {before.get(name)} there, {value} here"
            )


def _method(config: EpisodicConfig) -> str:
    events = {"segments": "segments (TCE)", "episodes": "whole episodes"}[config.events]
    bounds = f"a trust region of {config.mean_bound:g} and {config.covariance_bound:g} nats"
    return f"{events} within " + (bounds if config.constraint == "trust_region" else f"a clip of {config.clip:g}")


def _seeds(seed: int, use: int, iteration: int, count: int) -> list[int]:
    return np.random.SeedSequence([seed, use, iteration]).generate_state(count).tolist()


def _figures(row: dict[str, Any]) -> str:
    shown = (("return", "return", "{:.1f}"), ("success", "success", "{:.0%}"), ("held-out", "eval_success", "{:.0%}"))
    return ", ".join(f"{label} {shape.format(row[key])}" for label, key, shape in shown if key in row)


def _line(row: dict[str, Any]) -> str:
    return json_text(row) + "\n"
