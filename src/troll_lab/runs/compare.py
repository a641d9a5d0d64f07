"""Runs a grid: each point is one `troll train`, and as many run at once as there are GPUs or cores."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from troll_lab.lock import empty, locked
from troll_lab.recipes import RecipeError
from troll_lab.runs.build import LOCK as RUN_LOCK
from troll_lab.runs.build import check_same_run, model_path
from troll_lab.runs.comparison import read_comparison
from troll_lab.runs.comparison_files import write_comparison
from troll_lab.runs.comparison_tables import console_table
from troll_lab.runs.grid import PlannedRun, claim
from troll_lab.runs.recorded import MANIFEST, read_summary
from troll_lab.runs.slots import Slot, environments, gpus
from troll_lab.terminal import say
from troll_lab.trl.checkpoints import newest_complete

#: The lock that a comparison and its runs hold until the last of them ends.
LOCK = "compare.lock"
_POLL_SECONDS = 0.25
_LOG_LINES = 5
Outcome = Literal["finished", "failed", "interrupted"]


def compare(
    runs: Sequence[PlannedRun],
    folder: Path,
    console: Console,
    jobs: int | None = None,
    command: str | None = None,
    settled: Sequence[str] = (),
) -> Outcome:
    """Makes the runs of a grid that are not finished yet, and writes the comparison of all finished ones.

    `folder` then has a manifest, a run folder and a log for each run, and the comparison as a page, as JSON and as a
    Markdown table. The same grid, or one with more runs, can be continued there: finished runs stay, and interrupted
    ones resume from their last checkpoint. If a run fails, the others still run.

    Args:
        runs: The runs from `troll_lab.runs.grid.expand`.
        folder: The folder of the comparison; made if it does not exist.
        console: The console for progress and results.
        jobs: The number of runs at once, at least 1. By default one for each GPU, or for each core without a GPU.
            Each run sees one GPU.
        command: The command that made the runs, for the page.
        settled: Fields that were tuned for each method: runs that differ in them still belong to one method.

    Returns:
        "finished" if every run is; "failed" if one failed; "interrupted" after Ctrl-C, which stops the runs so that
        they can be resumed.

    Raises:
        RecipeError: If `folder` holds anything but (a part of) this grid, another comparison or a run that it left
            behind uses it, or a model cannot be made.
        troll_lab.tasks.TaskError: If the toy model cannot learn a task.
    """
    with _locked(folder) as lock:
        runs = claim(folder, command, runs, settled)
        for run in runs:
            check_same_run(run.settings, folder / run.name, may_differ=lambda name: name == "output_dir")
        waiting = [run for run in runs if not _is_finished(folder / run.name)]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        devices = [] if all(run.recipe.training.use_cpu for run in runs) else gpus()
        jobs = min(len(runs), jobs or len(devices) or cores)
        done = len(runs) - len(waiting)
        say(console, f"{len(runs)} runs, {done} finished already, {jobs} at once; output in {folder}")
        outcome: Outcome = "finished"
        failed: list[str] = []
        with _stopped_by_signals() as interrupts:
            try:
                for run in waiting:  # before any run starts, or two processes would make the same model
                    model_path(run.recipe)
                slots = [Slot(environment, lock) for environment in environments(jobs, cores, devices)]
                failed = _run_all(waiting, folder, slots, interrupts, console)
                outcome = "failed" if failed else "finished"
            except KeyboardInterrupt:
                outcome = "interrupted"
        _print_results(runs, folder, failed, console)
        if outcome == "interrupted":
            say(console, "interrupted; the same command resumes")
        return outcome


def _locked(folder: Path) -> contextlib.AbstractContextManager[int]:
    """The folder's lock. The runs inherit its file descriptor, so that orphans keep it."""
    holder = "another troll compare, or a run that it left behind,"
    return locked(folder, LOCK, marker=MANIFEST, content="comparison", holder=holder, error=RecipeError)


def _is_finished(output: Path) -> bool:
    return read_summary(output).get("status") == "finished"


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
        """Delays interrupts to the end of the context: a process that no variable holds yet would be lost."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[_Interrupts]:
    """Makes every request to stop raise KeyboardInterrupt, so that no child outlives this process.

    A Python handler also gives the children the default action if a background shell had SIGINT ignored.
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


def _run_all(
    waiting: Sequence[PlannedRun], folder: Path, slots: Sequence[Slot], interrupts: _Interrupts, console: Console
) -> list[str]:
    """Runs all, and returns the names of those that failed."""
    queue, running, failed = deque(waiting), dict[Slot, PlannedRun](), list[str]()
    bars = _ProgressBars(console, len(waiting))
    try:
        while queue or running:
            for slot in slots:
                if queue and slot not in running:
                    run = queue.popleft()
                    arguments = _arguments(run, folder / run.name, _checkpoint(folder / run.name, console))
                    with interrupts.held_back():
                        slot.start(arguments, folder / f"{run.name}.log")
                        running[slot] = run
                    bars.started(run)
            ended, _, _ = select.select(list(running), [], [], _POLL_SECONDS)
            for slot, run in list(running.items()):
                output = folder / run.name
                bars.moved(run.name, _last_step(output))
                if slot in ended:
                    code = slot.exit_code()
                    del running[slot]
                    succeeded = code == 0 and _is_finished(output)
                    failed += [] if succeeded else [run.name]
                    bars.ended(run.name, "finished" if succeeded else f"failed with exit code {code}")
    finally:
        bars.stop()
        _stop(slots, list(running), console)
    return failed


def _checkpoint(output: Path, console: Console) -> Path | None:
    """The checkpoint to resume a run from. Without one, its files are deleted: a run starts in an empty folder."""
    checkpoint, passed_over = newest_complete(output)
    if checkpoint is None and output.exists():
        reasons = "".join(f"; {path.name}: {lacks}" for path, lacks in passed_over.items())
        say(console, f"deleting  the files of {output.name}: it has no complete checkpoint{reasons}")
        empty(output, RUN_LOCK, holder="another troll train", error=RecipeError)
    return checkpoint


def _arguments(run: PlannedRun, output: Path, checkpoint: Path | None) -> list[str]:
    """The arguments of `troll train` for a run."""
    resume = [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]
    return [run.recipe.given, *run.overrides, "--output_dir", str(output), *resume]


def _stop(slots: Sequence[Slot], running: Sequence[Slot], console: Console) -> None:
    if running:
        say(console, f"stopping {len(running)} runs; Ctrl-C again kills them")
    try:
        for slot in running:
            slot.interrupt()
        for slot in slots:
            slot.close()
        for slot in slots:
            slot.wait()
    except KeyboardInterrupt:
        for slot in slots:
            slot.kill()
        raise


def _last_step(output: Path) -> int:
    try:
        with (output / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines(keepends=True)
        return int(json.loads([line for line in lines if line.endswith(b"\n")][-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0  # nothing is logged yet


class _ProgressBars:
    """Progress bars for all runs and for each running one; on anything but a terminal, a line per start and end."""

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


def _print_results(runs: Sequence[PlannedRun], folder: Path, failed: Sequence[str], console: Console) -> None:
    if any(_is_finished(folder / run.name) for run in runs):
        try:
            console.print(console_table(read_comparison([folder])))
            say(console, f"comparison  {write_comparison([folder], folder)}")
        except ImportError as error:
            say(console, f"no comparison page: {error}")
    for name in failed:
        log = folder / f"{name}.log"
        say(console, f"failed: {name}; its log is {log} and ends with")
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        for line in [line for line in lines if line.strip()][-_LOG_LINES:]:
            say(console, f"  {line}")
