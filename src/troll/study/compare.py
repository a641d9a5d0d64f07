"""Runs a grid: each point is one ``troll train`` in a process of its own, as many at once as there are cores."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from troll.files import write_atomically
from troll.recipes import RecipeError
from troll.study.comparison import MANIFEST, Comparison, read_runs
from troll.study.comparison_page import write_comparison
from troll.study.comparison_tables import console_table
from troll.study.grid import PlannedRun
from troll.study.run import model_path
from troll.study.run_folder import read_json

_POLL_SECONDS = 0.25
_LOG_LINES = 5
Outcome = Literal["finished", "failed", "interrupted"]


def compare(runs: Sequence[PlannedRun], folder: Path, console: Console, jobs: int | None = None) -> Outcome:
    """Makes the runs of a grid that are not finished yet, and writes the comparison of all that are.

    ``folder`` then holds a manifest, a run folder and a log for each run, and the comparison as a page, as JSON and as
    a Markdown table. The same grid again goes on: finished runs stay, interrupted ones resume from their last
    checkpoint. A run that fails does not keep the others from running.

    Args:
        runs: From :func:`troll.study.grid.expand`.
        folder: Made if need be.
        console: Where progress and results are printed.
        jobs: Runs at once, at least 1. By default as many as there are cores, or one where there is a GPU.

    Returns:
        "finished" if every run is; "failed" if one failed; "interrupted" after Ctrl-C, with which the children end in
        order and can be resumed.

    Raises:
        RecipeError: If ``folder`` holds anything but this grid, or a model cannot be made.
        troll.tasks.TaskError: If the embedded model cannot learn a task.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(len(runs), jobs or (1 if torch.cuda.is_available() else cores))
    _claim(folder, runs)
    for run in runs:
        _check_settings(run, folder)
    waiting = [run for run in runs if not _is_finished(folder / run.name)]
    console.print(
        f"{len(runs)} runs, {len(runs) - len(waiting)} finished already, {jobs} at once; output in {folder}",
        soft_wrap=True,
    )
    outcome: Outcome = "finished"
    failed: list[str] = []
    with _stopped_by_signals():
        try:
            for run in waiting:  # before any of them, or two processes would make the same model
                model_path(run.recipe)
            environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // jobs))}
            failed = _run_all(waiting, folder, jobs, environment, console)
        except KeyboardInterrupt:
            outcome = "interrupted"
    _tell(runs, folder, failed, console)
    if outcome == "interrupted":
        console.print("interrupted; the same command goes on", soft_wrap=True)
        return outcome
    return "failed" if failed else "finished"


def _claim(folder: Path, runs: Sequence[PlannedRun]) -> None:
    # Through JSON, as it will be read back.
    grid = json.loads(json.dumps({run.name: run.settings for run in runs}))
    manifest = folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if manifest.is_file():
            _check_same(read_json(manifest).get("runs"), grid, folder)
        elif any(folder.iterdir()):
            raise RecipeError(f"{folder} is not empty and holds no comparison: choose another with --output_dir")
        else:
            write_atomically(manifest, json.dumps({"runs": grid}, indent=2) + "\n")
    except OSError as error:
        raise RecipeError(f"output_dir {folder} cannot be used: {error.strerror}") from error


def _check_same(recorded: object, grid: Mapping[str, object], folder: Path) -> None:
    if recorded == grid:
        return
    recorded = recorded if isinstance(recorded, dict) else {}
    differing = sorted(name for name in {*recorded, *grid} if recorded.get(name) != grid.get(name))
    raise RecipeError(
        f"{folder} holds another comparison ({len(differing)} runs differ, the first is {differing[0]}): "
        "choose another folder with --output_dir"
    )


def _check_settings(run: PlannedRun, folder: Path) -> None:
    config = folder / run.name / "config.yaml"
    if not config.is_file():
        return
    recorded = yaml.safe_load(config.read_text())
    expected = yaml.safe_load(yaml.safe_dump(run.settings))
    if not isinstance(recorded, dict) or recorded | {"output_dir": None} != expected | {"output_dir": None}:
        raise RecipeError(f"{config.parent} holds a run with other settings: choose another folder with --output_dir")


def _is_finished(output: Path) -> bool:
    summary = output / "summary.json"
    return summary.is_file() and read_json(summary).get("status") == "finished"


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Has every request to stop raise KeyboardInterrupt, so that no child outlives this process.

    A handler of Python's own also gives the children the default action, where a shell in the background had SIGINT
    ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    wanted = [signal.SIGINT, signal.SIGTERM]
    wanted += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # ignored by nohup
    earlier = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _run_all(
    waiting: Sequence[PlannedRun], folder: Path, jobs: int, environment: Mapping[str, str], console: Console
) -> list[str]:
    """Runs all, and returns the names of those that failed."""
    queue, running, failed = deque(waiting), dict[str, subprocess.Popen[bytes]](), []
    board = _Board(console, len(waiting))
    try:
        while queue or running:
            while queue and len(running) < jobs:
                run = queue.popleft()
                running[run.name] = _start(run, folder, environment)
                board.started(run)
            time.sleep(_POLL_SECONDS)
            for name, process in list(running.items()):
                board.moved(name, _last_step(folder / name))
                if process.poll() is not None:
                    del running[name]
                    succeeded = process.returncode == 0 and _is_finished(folder / name)
                    failed += [] if succeeded else [name]
                    board.ended(name, "finished" if succeeded else f"failed with exit code {process.returncode}")
    finally:
        board.stop()
        _stop(list(running.values()), console)
    return failed


def _start(run: PlannedRun, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    output = folder / run.name
    checkpoint = _last_checkpoint(output)
    if checkpoint is None and output.exists():
        shutil.rmtree(output)  # what this very run left before its first checkpoint
    with (folder / f"{run.name}.log").open("ab") as log:
        # In a session of its own: Ctrl-C reaches this process alone, which passes it on once.
        return subprocess.Popen(
            _command(run, output, checkpoint),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _command(run: PlannedRun, output: Path, checkpoint: Path | None) -> list[str]:
    resume = [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]
    command = [sys.executable, "-m", "troll.cli", "train", run.recipe.given, *run.overrides]
    return [*command, "--output_dir", str(output), *resume]


def _last_checkpoint(output: Path) -> Path | None:
    # The state is the last file of a checkpoint: without it the run was killed while it wrote.
    complete = {
        int(path.parent.name.removeprefix("checkpoint-")): path.parent
        for path in output.glob("checkpoint-*/trainer_state.json")
    }
    return complete[max(complete)] if complete else None


def _stop(processes: Sequence[subprocess.Popen[bytes]], console: Console) -> None:
    alive = [process for process in processes if process.poll() is None]
    if not alive:
        return
    console.print(f"stopping {len(alive)} runs; Ctrl-C again kills them", soft_wrap=True)
    try:
        for process in alive:
            process.send_signal(signal.SIGINT)
        for process in alive:
            process.wait()
    except KeyboardInterrupt:
        for process in alive:
            process.kill()
            process.wait()
        raise


def _last_step(output: Path) -> int:
    try:
        with (output / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines(keepends=True)
        return int(json.loads([line for line in lines if line.endswith(b"\n")][-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0  # nothing is logged yet


def _log_end(path: Path) -> list[str]:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line for line in lines if line.strip()][-_LOG_LINES:]


class _Board:
    """Progress bars of all runs and of the running ones; on anything but a terminal, a line per start and end."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.overall = self.progress.add_task("runs", total=total)
        self.bars: dict[str, TaskID] = {}
        if console.is_terminal:
            self.progress.start()

    def started(self, run: PlannedRun) -> None:
        steps = run.recipe.training.max_steps
        self.bars[run.name] = self.progress.add_task(f"  {run.name}", total=steps if steps > 0 else None)
        if not self.console.is_terminal:
            self.console.print(f"started   {run.name}", soft_wrap=True)

    def moved(self, name: str, step: int) -> None:
        self.progress.update(self.bars[name], completed=step)

    def ended(self, name: str, how: str) -> None:
        self.done += 1
        self.progress.remove_task(self.bars.pop(name))
        self.progress.update(self.overall, completed=self.done)
        self.console.print(f"{how}  {name} ({self.done} of {self.total})", soft_wrap=True)

    def stop(self) -> None:
        if self.progress.live.is_started:
            self.progress.stop()


def _tell(runs: Sequence[PlannedRun], folder: Path, failed: Sequence[str], console: Console) -> None:
    if any(_is_finished(folder / run.name) for run in runs):
        console.print(console_table(Comparison(read_runs([folder]))))
        try:
            console.print(f"comparison  {write_comparison([folder], folder)}", soft_wrap=True)
        except ImportError as error:
            console.print(f"no page: {error}", soft_wrap=True)
    for name in failed:
        console.print(f"failed: {name}; its log is {folder / name}.log and ends with", soft_wrap=True, markup=False)
        for line in _log_end(folder / f"{name}.log"):
            console.print(f"  {line}", soft_wrap=True, markup=False)
