"""Tests by calling functions: the program runs in one sandbox, and its tests run in another, the judge's.

No test and no expected value enters the program's sandbox, only the arguments that the tests pass to the program. The
judge calls the program's functions over a channel and compares copies of what they return. So outcomes come from a
process that the program cannot reach.

Tests with `plain` run in the program's own process instead, where the program can fake its outcomes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any

from troll_sandbox.cases import CodeTests, FunctionTests, number_of
from troll_sandbox.errors import KilledError, SandboxError
from troll_sandbox.launch import Launcher, Process
from troll_sandbox.limits import NOT_RUN, OUT_OF_MEMORY, REASONS, Limits, Outcome
from troll_sandbox.supervise import LISTS_CHILDREN, PATIENCE, Watch, wait_for
from troll_sandbox.unbounded import write_json

#: Seconds to wait for the end of a killed judge, and for the outcomes of a judge whose program was killed.
END_SECONDS = 1.0

#: A sandbox whose program no longer answers was killed if it ends by SIGKILL within this time.
KILLED_SECONDS = 0.25

#: The judge's reason for a program that ended during a test; it is replaced by the cause.
ENDED = "exited before the tests ended"

#: The greeting that a sandbox reports before it runs the program.
READY = b"+"

#: Bound on the length of one outcome; the judge shortens reasons to fit.
_MOST_BYTES = 4096


class Judge:
    """A process that tests the programs of one thread, one after the other. It ends with the thread that makes it.

    Args:
        sandbox: Starts the judge.

    Attributes:
        process: The judge's sandbox.

    Raises:
        SandboxError: It could not be started.
    """

    def __init__(self, sandbox: Launcher) -> None:
        self._control, theirs = socket.socketpair()
        try:
            # It does not confine itself: it has to fork, and it runs no code of the program's.
            self.process = sandbox.start("judge", limits=Limits(), stdin=theirs.fileno(), stdout=None)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def submit(self, job: dict[str, Any], channel: int) -> FileIO:
        """Starts the tests of a program.

        Args:
            job: The tests, as `inside/judge.py` reads them.
            channel: File descriptor of the channel to the program.

        Returns:
            A pipe that gives each outcome as a line of JSON.

        Raises:
            OSError: The judge is gone.
        """
        ours, theirs = os.pipe()
        report = FileIO(ours)
        try:
            content = write_json(job).encode()
            socket.send_fds(self._control, [len(content).to_bytes(8, "big")], [channel, theirs])
            self._control.sendall(content)
        except BaseException:
            report.close()
            raise
        finally:
            os.close(theirs)
        return report

    def close(self) -> None:
        """Ends it at once, even during a test."""
        with contextlib.suppress(OSError):
            self._control.close()
        self.process.end()


class JudgeEndedError(SandboxError):
    """The judge is gone; another one has to take its place."""


def run_functions(
    sandbox: Launcher,
    judge: Judge,
    program: str,
    tests: CodeTests | FunctionTests,
    limits: Limits,
    *,
    stop_at_failure: bool = False,
) -> list[Outcome]:
    """Runs a program once, in a fresh sandbox, and tests its functions.

    With `tests.plain`, the tests run without a judge, in the program's process and sandbox. Everything works there as
    in one file: tests can look at printed text, inherit from the program's classes and use its comparisons. In
    exchange, the program can find the expected values, return objects that equal everything, change the modules that
    the tests use, or report outcomes itself. Use it only for data sets whose tests need it.

    Args:
        sandbox: Starts the program.
        judge: Runs the tests.
        program: Python source.
        tests: Code or calls, with the expected results.
        limits: Limits of the program for all its tests together. The judge has twice the CPU time for its checks, and
            twice the memory.
        stop_at_failure: Whether the tests after the first failing one are left out; their reason is "not run".

    Returns:
        An outcome per test. Tests that were not reached have the reason why the program ended.

    Raises:
        JudgeEndedError: The judge is gone.
        KilledError: The program was killed.
        SandboxError: The program's sandbox could not be started.
    """
    job = {
        "source": program,
        **vars(tests),
        "cpu_seconds": limits.cpu_seconds,
        "wall_seconds": PATIENCE * limits.wall_seconds,  # a backstop
        "memory_bytes": limits.memory_bytes,
        "stop_at_failure": stop_at_failure,
    }
    plain = isinstance(tests, CodeTests) and tests.plain
    count = number_of(tests)
    run = _run_plain(sandbox, job, count, limits) if plain else _run_judged(sandbox, judge, job, count, limits)
    outcomes = run.outcomes + [Outcome(False, run.rest)] * (count - len(run.outcomes))
    if run.cpu_seconds is not None:
        outcomes = [replace(outcome, cpu_seconds=run.cpu_seconds / count) for outcome in outcomes]
    if stop_at_failure:
        ran = next((number for number, outcome in enumerate(outcomes, 1) if not outcome.passed), count)
        outcomes[ran:] = [NOT_RUN] * (count - ran)
    if run.killed:
        raise KilledError(outcomes)
    return outcomes


@dataclass(frozen=True)
class _Run:
    """One run of a program: its outcomes, the reason for missing ones, whether it was killed, and its CPU time."""

    outcomes: list[Outcome]
    rest: str
    killed: bool
    cpu_seconds: float | None


def _run_judged(sandbox: Launcher, judge: Judge, job: dict[str, Any], count: int, limits: Limits) -> _Run:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = sandbox.start("functions", limits=limits, stdin=theirs.fileno(), stdout=subprocess.PIPE)
        with process:
            theirs.close()
            try:
                report = judge.submit(job, ours.fileno())
            except OSError as error:
                raise JudgeEndedError(f"the judge has ended: {error}") from error
            ours.close()
            with report:
                run = _follow([process, judge.process], report.fileno(), count, limits)
            failed = bool(run.outcomes) and not run.outcomes[-1].passed
            # Whether the judge itself is gone: its child for this program always ends first.
            if len(run.outcomes) < count and judge.process.has_ended(0.0 if failed else END_SECONDS):
                raise JudgeEndedError(f"the judge has ended with status {judge.process.returncode}")
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            if process.stdout.read(1) != READY:
                raise SandboxError("the sandbox did not start")
    return run


def _run_plain(sandbox: Launcher, job: dict[str, Any], count: int, limits: Limits) -> _Run:
    mark = secrets.token_hex(8)  # tells outcomes from other output
    with open(os.memfd_create("job"), "w+b") as given:
        given.write(write_json({**job, "mark": mark}).encode())
        given.seek(0)
        process = sandbox.start("plain", limits=limits, stdin=given.fileno(), stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        return _follow([process], process.stdout.fileno(), count, limits, mark.encode(), READY)


def _follow(
    processes: Sequence[Process], report: int, count: int, limits: Limits, mark: bytes = b"", greeting: bytes = b""
) -> _Run:
    """Reads the outcomes of a program, ends its sandbox, and finds out why tests are missing.

    The first process is the program's sandbox, the second its judge, if there is one. The report starts with the
    greeting, and each outcome is a line after the mark; raises `SandboxError` if the greeting is missing.
    """
    process, judged = processes[0], len(processes) > 1
    watch = Watch(processes, limits)
    text, kind = _read(process, watch, report, count * _MOST_BYTES)
    if not text.startswith(greeting):
        raise SandboxError("the sandbox did not start")
    *lines, _ = text[len(greeting) :].split(b"\n")  # the last line may be cut off
    found = (read_outcome(line[len(mark) :]) for line in lines[:count] if line.startswith(mark))
    outcomes = [outcome for outcome in found if outcome is not None]
    failed = bool(outcomes) and not outcomes[-1].passed
    ended = failed and outcomes[-1].reason == ENDED
    silent = len(outcomes) < count and not (judged and failed)  # no outcome says why others are missing
    if kind is None and silent and judged:
        # The judge's child for this program is gone. It reports why, unless it was killed, or is in a long call of C.
        killed = watch.others_seconds <= limits.cpu_seconds
    else:
        killed = kind is None and (ended or silent) and process.killed(KILLED_SECONDS)
    over = process.out_of_memory()
    watch.measure()  # before the end: only the CPU time until now counts
    ended_seconds = process.end()
    if max(ended_seconds, watch.cpu_seconds) > limits.cpu_seconds:
        kind, killed = kind or "cpu", False
    if kind:
        cause = REASONS[kind]
    elif over:
        cause, killed = OUT_OF_MEMORY.reason, False
    elif silent and judged:
        cause = "the results took too long to check"
    elif ended or silent:
        cause = ENDED
    else:
        cause = outcomes[-1].reason
    if ended or (kind == "cpu" and len(outcomes) == count):
        outcomes[-1] = Outcome(False, cause)
    # The start-up time counts for every program, even for one that was still running, so that no way to end is cheaper.
    seconds = max(ended_seconds, watch.before + watch.cpu_seconds)
    return _Run(outcomes, cause, killed, seconds if process.exact and LISTS_CHILDREN else None)


def read_outcome(line: str | bytes) -> Outcome | None:
    """The outcome in a line of JSON; None if there is none: a program may write lines to the report itself."""
    try:
        passed, reason = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return Outcome(passed is True, reason) if isinstance(reason, str) else None


def _read(process: Process, watch: Watch, report: int, most: int) -> tuple[bytes, str | None]:
    """The report, and the limit that the program exceeded, if any; the program is then killed."""
    due = time.monotonic() + watch.period
    text, kind, end = b"", None, math.inf
    while len(text) <= most and time.monotonic() < end:
        if wait_for(report, max(0.0, due - time.monotonic())):
            part = os.read(report, 1 << 16)
            if not part:
                break
            text += part
        if time.monotonic() >= due:
            due = time.monotonic() + watch.period
            if kind is None and (kind := watch.verdict()):
                process.end()
                end = time.monotonic() + END_SECONDS
    return text, kind
