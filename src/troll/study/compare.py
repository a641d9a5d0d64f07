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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from troll.files import locked, write_atomically
from troll.recipes import RecipeError, differences
from troll.run_folder import is_finished, read_json
from troll.study.comparison import MANIFEST, read_comparison
from troll.study.comparison_page import write_comparison
from troll.study.comparison_tables import console_table
from troll.study.grid import PlannedRun
from troll.study.run import check_same_run, model_path
from troll.terminal import say
from troll.trl.checkpoints import newest_complete

#: Held by a comparison and its runs as long as any of them lives.
LOCK = "compare.lock"
_POLL_SECONDS = 0.25
_LOG_LINES = 5
Outcome = Literal["finished", "failed", "interrupted"]


def compare(
    runs: Sequence[PlannedRun], folder: Path, console: Console, jobs: int | None = None, command: str | None = None
) -> Outcome:
    """Makes the runs of a grid that are not finished yet, and writes the comparison of all that are.

    ``folder`` then holds a manifest, a run folder and a log for each run, and the comparison as a page, as JSON and as
    a Markdown table. The same grid again, or one with more runs, goes on: finished runs stay, interrupted ones resume
    from their last checkpoint. A run that fails does not keep the others from running.

    Args:
        runs: From :func:`troll.study.grid.expand`.
        folder: Made if need be.
        console: Where progress and results are printed.
        jobs: Runs at once, at least 1. By default as many as there are cores, or one where there is a GPU.
        command: What the page says of how it was made.

    Returns:
        "finished" if every run is; "failed" if one failed; "interrupted" after Ctrl-C, with which the children end in
        order and can be resumed.

    Raises:
        RecipeError: If ``folder`` holds anything but (a part of) this grid, another comparison or a run that it left
            behind is at work there, or a model cannot be made.
        troll.tasks.TaskError: If the embedded model cannot learn a task.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(len(runs), jobs or (1 if torch.cuda.is_available() else cores))
    with _locked(folder) as lock:
        runs = _claim(folder, runs, command)
        for run in runs:
            check_same_run(run.settings, folder / run.name, may_change=lambda name: name == "output_dir")
        waiting = [run for run in runs if not _is_finished(folder / run.name)]
        done = len(runs) - len(waiting)
        say(console, f"{len(runs)} runs, {done} finished already, {jobs} at once; output in {folder}")
        outcome: Outcome = "finished"
        failed: list[str] = []
        with _stopped_by_signals() as interrupts:
            try:
                for run in waiting:  # before any of them, or two processes would make the same model
                    model_path(run.recipe)
                environment = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // jobs))}
                launcher = _Launcher(folder, environment, lock, interrupts)
                failed = _run_all(waiting, launcher, jobs, console)
            except KeyboardInterrupt:
                outcome = "interrupted"
        _tell(runs, folder, failed, console)
    if outcome == "interrupted":
        say(console, "interrupted; the same command goes on")
        return outcome
    return "failed" if failed else "finished"


def _locked(folder: Path) -> contextlib.AbstractContextManager[int]:
    """The folder's lock, whose file descriptor the runs inherit: orphans keep it."""
    holder = "another troll compare, or a run that it left behind,"
    return locked(folder, LOCK, marker=MANIFEST, content="comparison", holder=holder, error=RecipeError)


def _claim(folder: Path, runs: Sequence[PlannedRun], command: str | None) -> list[PlannedRun]:
    """Writes the manifest. A run that was recorded keeps its name, which has fewer fields in it in a smaller grid."""
    manifest = folder / MANIFEST
    try:
        recorded: Any = read_json(manifest).get("runs") if manifest.is_file() else {}
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is no manifest of a comparison: choose another folder with --output_dir")
    kept = {run.name: _recorded_name(run, recorded) for run in runs}
    for name in recorded:
        if name in kept.values():
            continue
        closest = min((differences(recorded[name], run.settings) for run in runs), key=len)
        if closest:
            raise RecipeError(
                f"{folder} holds another comparison: its run {name} is not in this grid ({closest[0]}); choose another "
                "folder with --output_dir"
            )
    named = [replace(run, name=kept[run.name] or run.name) for run in runs]
    if len({run.name for run in named}) < len(named):
        raise RecipeError(f"{folder} holds other runs of these names: choose another folder with --output_dir")
    content = {
        "command": command,
        "recipes": {run.name: run.recipe.name for run in named},
        "runs": {run.name: run.settings for run in named},
    }
    write_atomically(manifest, json.dumps(content, indent=2) + "\n")
    return named


def _recorded_name(run: PlannedRun, recorded: Mapping[str, Mapping[str, Any]]) -> str | None:
    return next((name for name, settings in recorded.items() if not differences(settings, run.settings)), None)


def _is_finished(output: Path) -> bool:
    summary = output / "summary.json"
    return summary.is_file() and is_finished(read_json(summary))


class _Interrupts:
    """A signal handler that raises KeyboardInterrupt, unless it is held back."""

    def __init__(self) -> None:
        self._held, self._asked = False, False

    def __call__(self, *_: object) -> None:
        self._asked = True
        if not self._held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Raises at the end what comes meanwhile: a process that no variable holds yet would be lost."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Interrupts]:
    """Has every request to stop raise KeyboardInterrupt, so that no child outlives this process.

    A handler of Python's own also gives the children the default action, where a shell in the background had SIGINT
    ignored.
    """
    interrupts = _Interrupts()
    wanted = [signal.SIGINT, signal.SIGTERM]
    wanted += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # ignored by nohup
    earlier = {number: signal.signal(number, interrupts) for number in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class _Launcher:
    """Starts runs, and knows those that have not ended.

    Args:
        folder: Of the comparison.
        environment: Of the runs.
        lock: The lock's file descriptor, for the runs to inherit.
        interrupts: Held back while a process starts.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], lock: int, interrupts: _Interrupts) -> None:
        self.folder, self.environment, self.lock, self.interrupts = folder, environment, lock, interrupts
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, run: PlannedRun, checkpoint: Path | None) -> None:
        output = self.folder / run.name
        with (self.folder / f"{run.name}.log").open("ab") as log, self.interrupts.held_back():
            # In a session of its own: Ctrl-C reaches this process alone, which passes it on once.
            self.running[run.name] = subprocess.Popen(
                _command(run, output, checkpoint),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,
                pass_fds=[self.lock],
            )


def _run_all(waiting: Sequence[PlannedRun], launcher: _Launcher, jobs: int, console: Console) -> list[str]:
    """Runs all, and returns the names of those that failed."""
    queue, running, failed = deque(waiting), launcher.running, []
    board = _Board(console, len(waiting))
    try:
        while queue or running:
            while queue and len(running) < jobs:
                run = queue.popleft()
                launcher.start(run, _checkpoint(launcher.folder / run.name, console))
                board.started(run)
            time.sleep(_POLL_SECONDS)
            for name, process in list(running.items()):
                output = launcher.folder / name
                board.moved(name, _last_step(output))
                if process.poll() is not None:
                    del running[name]
                    succeeded = process.returncode == 0 and _is_finished(output)
                    failed += [] if succeeded else [name]
                    board.ended(name, "finished" if succeeded else f"failed with exit code {process.returncode}")
    finally:
        board.stop()
        _stop(list(running.values()), console)
    return failed


def _checkpoint(output: Path, console: Console) -> Path | None:
    """Where a run goes on. Where it cannot, what it left is deleted: a run starts in an empty folder."""
    checkpoint, passed_over = newest_complete(output)
    if checkpoint is None and output.exists():
        reasons = "".join(f"; {path.name}: {lacks}" for path, lacks in passed_over.items())
        say(console, f"deleting  what {output.name} left: it has no complete checkpoint{reasons}")
        shutil.rmtree(output)
    return checkpoint


def _command(run: PlannedRun, output: Path, checkpoint: Path | None) -> list[str]:
    resume = [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]
    command = [sys.executable, "-m", "troll.cli", "train", run.recipe.given, *run.overrides]
    return [*command, "--output_dir", str(output), *resume]


def _stop(processes: Sequence[subprocess.Popen[bytes]], console: Console) -> None:
    alive = [process for process in processes if process.poll() is None]
    if not alive:
        return
    say(console, f"stopping {len(alive)} runs; Ctrl-C again kills them")
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
        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.overall = self.progress.add_task("runs", total=total)
        self.bars: dict[str, TaskID] = {}
        if console.is_terminal:
            self.progress.start()

    def started(self, run: PlannedRun) -> None:
        steps = run.recipe.training.max_steps
        self.bars[run.name] = self.progress.add_task(f"  {run.name}", total=steps if steps > 0 else None)
        if not self.console.is_terminal:
            say(self.console, f"started   {run.name}")

    def moved(self, name: str, step: int) -> None:
        self.progress.update(self.bars[name], completed=step)

    def ended(self, name: str, how: str) -> None:
        self.done += 1
        self.progress.remove_task(self.bars.pop(name))
        self.progress.update(self.overall, completed=self.done)
        say(self.console, f"{how}  {name} ({self.done} of {self.total})")

    def stop(self) -> None:
        if self.progress.live.is_started:
            self.progress.stop()


def _tell(runs: Sequence[PlannedRun], folder: Path, failed: Sequence[str], console: Console) -> None:
    if any(_is_finished(folder / run.name) for run in runs):
        console.print(console_table(read_comparison([folder])))
        try:
            say(console, f"comparison  {write_comparison([folder], folder)}")
        except ImportError as error:
            say(console, f"no page: {error}")
    for name in failed:
        say(console, f"failed: {name}; its log is {folder / name}.log and ends with")
        for line in _log_end(folder / f"{name}.log"):
            say(console, f"  {line}")
