"""Tests by calling functions: the program in a sandbox of its own, and its tests in the judge's.

Neither a test nor an expected value enters the program's sandbox, but for what the tests pass to the program. The judge
calls its functions over a channel and compares copies of what they return, so an outcome comes from a process that the
program has no means to reach.

Tests that need more run in the program's own process, where they are asked to: there an outcome is the program's word.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from troll_sandbox.cases import CodeTests, FunctionTests, number_of
from troll_sandbox.errors import KilledError, SandboxError
from troll_sandbox.launch import Launcher, Process
from troll_sandbox.limits import NOT_RUN, OUT_OF_MEMORY, REASONS, Limits, Outcome
from troll_sandbox.supervise import PATIENCE, Watch, wait_for
from troll_sandbox.unbounded import write_json

#: How long a killed judge may take to be gone, and a judge whose program was killed to report what it has found.
END_SECONDS = 1.0

#: How long a sandbox may take to end whose program no longer answers; then it was not killed.
KILLED_SECONDS = 0.25

#: What the judge says of a program that ended while it was asked; here it becomes the cause.
ENDED = "exited before the tests ended"

#: What a sandbox says before it runs anything of the program's.
READY = b"+"

#: Of one outcome; the judge cuts reasons below that.
_MOST_BYTES = 4096


class Judge:
    """One judge, for the programs of one thread, one after the other.

    It lives no longer than the thread that makes it.

    Args:
        sandbox: Starts the judge.

    Attributes:
        process: As `Launcher.start` returned it.

    Raises:
        SandboxError: It could not be started.
    """

    def __init__(self, sandbox: Launcher) -> None:
        self._control, theirs = socket.socketpair()
        try:
            # It does not confine itself: it has to fork, and what it runs is the user's.
            self.process = sandbox.start("judge", limits=Limits(), stdin=theirs.fileno(), stdout=None)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def submit(self, job: dict[str, Any], channel: int) -> int:
        """Has a program judged.

        Args:
            job: The tests, as `inside/judge.py` reads them.
            channel: File descriptor of the channel to the program.

        Returns:
            File descriptor of a pipe with a line of JSON per outcome; the caller closes it.

        Raises:
            OSError: The judge is gone.
        """
        report, theirs = os.pipe()
        try:
            content = write_json(job).encode()
            socket.send_fds(self._control, [len(content).to_bytes(8, "big")], [channel, theirs])
            self._control.sendall(content)
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(theirs)
        return report

    def close(self) -> None:
        """Ends it at once, also in the middle of a test."""
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

    Where `tests.plain`, there is no judge: the tests run in the program's process, inside its sandbox. They then have
    everything that they have in one file: what the program prints, its classes to inherit from, its own comparisons.
    In exchange the program can find what is expected, return objects that equal everything, change the modules that
    the tests use, or report outcomes of its own. Only for data sets whose tests cannot do without.

    Args:
        sandbox: Starts the program.
        judge: Runs the tests.
        program: Python source.
        tests: The tests, with what they expect.
        limits: Of the program, for all its tests together; the judge has twice the CPU time to check
            what comes back, and twice the memory.
        stop_at_failure: Whether the tests after the first that fails are left out; their reason is "not run".

    Returns:
        An outcome per test. Those that were not reached share the reason of the one that ended the program.

    Raises:
        JudgeEndedError: The judge is gone.
        KilledError: The program was killed, or ended as if it had been.
        SandboxError: The program's sandbox could not be started.
    """
    job = {
        "source": program,
        **vars(tests),
        "cpu_seconds": limits.cpu_seconds,
        "wall_seconds": PATIENCE * limits.wall_seconds,  # for when nobody watches
        "memory_bytes": limits.memory_bytes,
        "stop_at_failure": stop_at_failure,
    }
    plain = isinstance(tests, CodeTests) and tests.plain
    count = number_of(tests)

    heard = _run_plain(sandbox, job, count, limits) if plain else _run_judged(sandbox, judge, job, count, limits)
    outcomes = _filled(heard, count, stop_at_failure)
    if heard.killed:
        raise KilledError(outcomes)
    return outcomes


@dataclass(frozen=True)
class _Heard:
    """What became of one run: outcomes, the reason of the tests that have none, and whether somebody killed it."""

    outcomes: list[Outcome]
    rest: str
    killed: bool


def _filled(heard: _Heard, count: int, stop_at_failure: bool) -> list[Outcome]:
    outcomes = heard.outcomes + [Outcome(False, heard.rest)] * (count - len(heard.outcomes))
    first = next((number for number, outcome in enumerate(outcomes) if not outcome.passed), count)
    if stop_at_failure and first < count:
        outcomes[first + 1 :] = [NOT_RUN] * (count - first - 1)
    return outcomes


def _run_judged(sandbox: Launcher, judge: Judge, job: dict[str, Any], count: int, limits: Limits) -> _Heard:
    ours, theirs = socket.socketpair()
    ready, to_ready = os.pipe()
    os.set_blocking(ready, False)
    with ours, theirs, open(ready, "rb", buffering=0) as greeting:
        try:
            process = sandbox.start("functions", limits=limits, stdin=theirs.fileno(), stdout=to_ready)
        finally:
            os.close(to_ready)
        try:
            theirs.close()
            try:
                report = judge.submit(job, ours.fileno())
            except OSError as error:
                raise JudgeEndedError(f"the judge has ended: {error}") from error
            ours.close()
            heard = _heard([process, judge.process], report, count, limits)
            failed = bool(heard.outcomes) and not heard.outcomes[-1].passed
            # The judge is gone, rather than only its process for this program, which is the first to go in either case.
            if len(heard.outcomes) < count and judge.process.has_ended(0.0 if failed else END_SECONDS):
                raise JudgeEndedError(f"the judge has ended with status {judge.process.returncode}")
        finally:
            process.end()
        if greeting.read(1) != READY:
            raise SandboxError("the sandbox did not start")
    return heard


def _run_plain(sandbox: Launcher, job: dict[str, Any], count: int, limits: Limits) -> _Heard:
    mark = secrets.token_hex(8)  # so that not just any output is taken for an outcome
    given = os.memfd_create("job")
    report, theirs = os.pipe()
    try:
        os.write(given, write_json({**job, "mark": mark}).encode())
        os.lseek(given, 0, os.SEEK_SET)
        process = sandbox.start("plain", limits=limits, stdin=given, stdout=theirs)
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(given)
        os.close(theirs)
    try:
        return _heard([process], report, count, limits, mark.encode(), READY)
    finally:
        process.end()


def _heard(
    processes: Sequence[Process], report: int, count: int, limits: Limits, mark: bytes = b"", greeting: bytes = b""
) -> _Heard:
    """What is reported on a program, whose process is the first; it has ended then.

    Raises:
        SandboxError: There was no greeting, but something should have been.
    """
    process = processes[0]
    watch = Watch(processes, limits)
    try:
        text, kind = _read(process, watch, report, count * _MOST_BYTES)
    finally:
        os.close(report)
    if not text.startswith(greeting):
        raise SandboxError("the sandbox did not start")
    *lines, _ = text[len(greeting) :].split(b"\n")  # the last may have been cut off
    said = (_outcome(line[len(mark) :]) for line in lines[:count] if line.startswith(mark))
    outcomes = [outcome for outcome in said if outcome is not None]
    failed = bool(outcomes) and not outcomes[-1].passed
    judged = len(processes) > 1
    ended = failed and outcomes[-1].reason == ENDED
    silent = len(outcomes) < count and not (judged and failed)  # nothing says why there are no more
    if kind is None and silent and judged:
        # The judge's process for this program is gone. It says why, unless it is killed or amid one long call of C.
        killed = watch.beside_seconds <= limits.cpu_seconds
    else:
        killed = kind is None and (ended or silent) and process.killed(KILLED_SECONDS)
    over = process.out_of_memory()
    # What counts is how much it has used until here, not how it would end.
    watch.measure()
    if max(process.end(), watch.cpu_seconds) > limits.cpu_seconds:
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
    return _Heard(outcomes, cause, killed)


def _outcome(line: bytes) -> Outcome | None:
    """The outcome that a line reports; None where it is no report, which only a program in that process can have."""
    try:
        passed, reason = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return Outcome(passed is True, reason) if isinstance(reason, str) else None


def _read(process: Process, watch: Watch, report: int, most: int) -> tuple[bytes, str | None]:
    """What is reported, and which limit the program passed until then, if any; it is killed for that."""
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
