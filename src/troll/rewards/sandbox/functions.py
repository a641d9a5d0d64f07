"""Tests by calling functions: the program in a sandbox of its own, and its tests in the judge's.

Neither a test nor an expected value enters the program's sandbox. The judge calls its functions over a channel and
compares copies of what they return, so an outcome comes from a process that the program has no means to reach.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from typing import Any

from troll.rewards.program import CodeTests, FunctionTests
from troll.rewards.sandbox.bubblewrap import Process, Sandbox, SandboxError, insistently
from troll.rewards.sandbox.judge import Judge
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.stdio import REASONS
from troll.rewards.sandbox.supervise import Watch, wait_for

#: How long a judge that was killed may take to be gone.
END_SECONDS = 1.0

#: What the judge says of a program that ended while it was asked; here it becomes the cause.
ENDED = "exited before the tests ended"

#: What a sandbox says before it runs anything of the program's.
READY = b"+"

#: Of one outcome; the judge cuts reasons below that.
_MOST_BYTES = 4096


class JudgeEndedError(RuntimeError):
    """The judge is gone; the program was not judged."""


def run_functions(
    sandbox: Sandbox, judge: Judge, program: str, tests: CodeTests | FunctionTests, limits: Limits
) -> list[Outcome]:
    """Runs a program once, in a fresh sandbox, and tests its functions.

    Args:
        sandbox: Where to run it.
        judge: Which judges it.
        program: Python source.
        tests: What to test.
        limits: Of the program, for all its tests together; the judge has twice the CPU time to check
            what comes back, and twice the memory.

    Returns:
        An outcome per test. Those that were not reached share the reason of the one that ended the program.

    Raises:
        JudgeEndedError: The judge is gone; another one has to take its place.
        SandboxError: The program's sandbox could not be started, three times in a row.
    """
    return insistently(lambda: _run(sandbox, judge, program, tests, limits))


def _run(
    sandbox: Sandbox, judge: Judge, program: str, tests: CodeTests | FunctionTests, limits: Limits
) -> list[Outcome]:
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
                report = judge.submit(_job(program, tests, limits), ours.fileno())
            except OSError as error:
                raise JudgeEndedError(f"the judge has ended: {error}") from error
            ours.close()
            count = len(tests.tests) if isinstance(tests, CodeTests) else len(tests.inputs)
            outcomes = _outcomes(process, judge, report, count, limits)
        finally:
            process.end()
        if greeting.read(1) != READY:
            raise SandboxError("the sandbox did not start")
        return outcomes


def _job(program: str, tests: CodeTests | FunctionTests, limits: Limits) -> dict[str, Any]:
    return {
        "source": program,
        **vars(tests),
        "cpu_seconds": limits.cpu_seconds,
        "wall_seconds": limits.wall_seconds,
        "memory_bytes": limits.memory_bytes,
    }


def _outcomes(process: Process, judge: Judge, report: int, count: int, limits: Limits) -> list[Outcome]:
    lines, kind = _report(process, judge, report, limits, count * _MOST_BYTES)
    outcomes = [Outcome(*json.loads(line)) for line in lines[:count]]
    failed = bool(outcomes) and not outcomes[-1].passed
    if len(outcomes) < count and _has_ended(judge, 0.0 if failed else END_SECONDS):
        raise JudgeEndedError(f"the judge has ended with status {judge.process.returncode}")
    if outcomes and (outcomes[-1].reason == ENDED or kind == "cpu"):
        outcomes[-1] = Outcome(False, REASONS[kind] if kind else ENDED)
        failed = True
    # After nothing but passes, silence: the judge's own limits ended it.
    rest = outcomes[-1] if failed else Outcome(False, "the results took too long to check")
    return outcomes + [rest] * (count - len(outcomes))


def _has_ended(judge: Judge, seconds: float) -> bool:
    """Whether the judge is gone, rather than its process for one program, which is the first to go in either case."""
    try:
        judge.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _report(process: Process, judge: Judge, report: int, limits: Limits, most: int) -> tuple[list[bytes], str | None]:
    """What the judge reports, line by line, and which limit the program passed until then, if any; it is killed."""
    watch = Watch([process, judge.process], limits)
    due = time.monotonic() + watch.period
    text, kind = b"", None
    try:
        while len(text) <= most:
            if wait_for(report, max(0.0, due - time.monotonic())):
                part = os.read(report, 1 << 16)
                if not part:
                    break
                text += part
            if time.monotonic() >= due:
                due = time.monotonic() + watch.period
                kind = kind or watch.verdict()
                if kind:
                    process.end()
        # What counts is how much it has used until here, not how it would end.
        watch.measure()
        if max(process.end(), watch.cpu_seconds) > limits.cpu_seconds:
            kind = kind or "cpu"
    finally:
        os.close(report)
    *lines, _ = text.split(b"\n")  # the last may have been cut off
    return lines, kind
