"""Tests by standard input and output. The output is compared outside the sandbox, where the program cannot reach."""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Sequence
from dataclasses import replace
from subprocess import PIPE

from troll_sandbox.errors import SandboxError
from troll_sandbox.launch import Launcher, Process
from troll_sandbox.limits import NOT_RUN, OUT_OF_MEMORY, PASSED, REASONS, TIME_LIMIT, Limits, Outcome
from troll_sandbox.output import Compare, same_output
from troll_sandbox.supervise import Watch, wait_for

#: Wait status, CPU microseconds, whether the work folder is clean, length of output and of errors: `inside/stdio.py`.
REPORT = struct.Struct("<5q")

#: The largest number of an exception's characters in a reason.
REASON_LENGTH = 200


def run_stdio(
    sandbox: Launcher,
    program: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    limits: Limits,
    *,
    compare: Compare = "tokens",
    stop_at_failure: bool = False,
) -> list[Outcome]:
    """Runs a program once per input and compares what it prints.

    A program passes a test if it exits with status 0, within the limits, and prints the expected output (see
    `same_output`). Expected outputs never enter the sandbox; an input enters it after the previous test has ended.
    After a test that exceeds a limit on time or threads, the others are "not run".

    All tests share one sandbox, and each runs in its own process. A test that leaves files in the work folder, or that
    is killed together with its sandbox, makes the next test start a new one.

    Args:
        sandbox: Starts the sandboxes.
        program: Python source. Text that is not a program fails every test.
        inputs: T texts for standard input.
        outputs: T expected texts.
        limits: Limits of each test; the wall time is for all tests together.
        compare: See `same_output`.
        stop_at_failure: Whether the tests after the first failing one are left out.

    Returns:
        T outcomes.

    Raises:
        SandboxError: A sandbox could not be started, or was killed from outside. `ended` has the outcomes until then.
        ValueError: There are not as many inputs as outputs.
    """
    if len(inputs) != len(outputs):
        raise ValueError(f"as many inputs as outputs are needed, got {len(inputs)} and {len(outputs)}")
    outcomes: list[Outcome] = []
    longest = max(map(len, outputs), default=0)
    limits = replace(limits, output_bytes=max(limits.output_bytes, 4 * longest))  # the rest is room for white space
    left = limits.wall_seconds
    folder = ["/input"] if sandbox.isolated else []
    try:
        while len(outcomes) < len(inputs) and not (outcomes and _is_last(outcomes[-1], stop_at_failure)):
            if left <= 0:
                outcomes.append(Outcome(False, REASONS["wall"]))
                break
            with sandbox.start("stdio", folder, limits=limits, stdin=PIPE, stdout=PIPE) as process:
                runner = _Runner(process, program, limits)
                runner.watch = Watch([process], replace(limits, wall_seconds=left))
                for text, expected in list(zip(inputs, outputs, strict=True))[len(outcomes) :]:
                    outcomes.append(runner.test(text, expected, compare))
                    if not runner.clean or _is_last(outcomes[-1], stop_at_failure):
                        break
                left -= runner.watch.seconds
    except SandboxError as error:
        error.ended = outcomes
        raise
    return outcomes + [NOT_RUN] * (len(inputs) - len(outcomes))


def _is_last(outcome: Outcome, stop_at_failure: bool) -> bool:
    return (outcome.reason in REASONS.values() and outcome != OUT_OF_MEMORY) or (stop_at_failure and not outcome.passed)


class _Runner:
    """Tests one program in one sandbox, which is `clean` until it cannot be used for another test.

    Raises:
        SandboxError: The sandbox does not report that it has started; until then nothing of the program runs.
    """

    def __init__(self, process: Process, program: str, limits: Limits) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._limits = process, limits
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self.clean, self.watch = True, Watch([process], limits)
        try:
            self._send(program)
            self._receive(1)
        except _LimitError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from None

    def test(self, text: str, expected: str, compare: Compare) -> Outcome:
        """The outcome of one test; raises `SandboxError` if there is none."""
        self.watch.restart()
        try:
            self._send(text)
            status, microseconds, clean, *lengths = REPORT.unpack(self._receive(REPORT.size))
            output, errors = (self._receive(length) for length in lengths)
            self.clean = bool(clean)
            seconds = microseconds / 1e6 if self._process.exact else self.watch.cpu_seconds
            outcome = _ended(status, seconds, output, errors, self._limits)
            if self._process.exact:
                outcome = replace(outcome, cpu_seconds=seconds)
        except _LimitError as limit:
            self.clean = False
            return Outcome(False, str(limit))
        except SandboxError:
            if not self._process.out_of_memory():
                raise
            self.clean = False
            return OUT_OF_MEMORY
        ours, theirs = (data.decode("utf-8", "surrogateescape") for data in (output, _bytes(expected)))
        if outcome.passed and not same_output(ours, theirs, compare):
            return replace(outcome, passed=False, reason="wrong answer")
        return outcome

    def _send(self, text: str) -> None:
        data = _bytes(text)
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            self._wait(self._to, select.POLLOUT)
            try:
                view = view[os.write(self._to, view[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SandboxError("the sandbox ended early") from None

    def _receive(self, length: int) -> bytes:
        if not 0 <= length <= self._limits.output_bytes + REPORT.size + 2000:
            raise SandboxError(f"the sandbox reported an impossible length: {length}")
        parts = []
        while length:
            self._wait(self._from, select.POLLIN)
            part = os.read(self._from, min(length, 1 << 20))
            if not part:
                raise SandboxError("the sandbox ended early")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int) -> None:
        while not wait_for(descriptor, self.watch.period, event):
            if verdict := self.watch.verdict():
                raise _LimitError(REASONS[verdict])


class _LimitError(Exception):
    """The program has exceeded a limit; the message is the test's reason."""


def _bytes(text: str) -> bytes:
    # Lone surrogates become bytes that are not UTF-8: a program with them does not compile, and a program that prints
    # them as it read them gives the same bytes.
    return text.encode("utf-8", "surrogatepass")


def _ended(status: int, cpu_seconds: float, output: bytes, errors: bytes, limits: Limits) -> Outcome:
    """The outcome of a test by its wait status and what it used, before its output is compared.

    Raises:
        SandboxError: It was killed from outside, e.g. for lack of memory: programs cannot send SIGKILL.
    """
    code = os.waitstatus_to_exitcode(status)
    if cpu_seconds > limits.cpu_seconds:
        return TIME_LIMIT
    if code == -signal.SIGKILL:
        raise SandboxError("a program was killed from outside")
    if len(output) >= limits.output_bytes:
        return Outcome(False, "output limit")
    if code:
        return Outcome(False, failure(code, errors.decode("utf-8", "replace")))
    return PASSED


def failure(code: int, errors: str) -> str:
    """Why a program failed, from its exit status (negative for a signal) and its standard error."""
    if code < 0:
        return f"killed by signal {-code}"
    last = (errors.strip().splitlines() or [""])[-1]
    if last.startswith("MemoryError"):
        return OUT_OF_MEMORY.reason
    return f"raised {last[:REASON_LENGTH]}" if code == 1 and last else f"exit status {code}"
