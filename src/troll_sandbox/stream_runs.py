"""Tests by standard input and output: the program prints, and what it printed is compared outside its reach."""

from __future__ import annotations

import os
import select
import signal
import struct
from collections.abc import Sequence
from dataclasses import replace

from troll_sandbox.errors import SandboxError
from troll_sandbox.launch import Launcher, Process
from troll_sandbox.limits import NOT_RUN, OUT_OF_MEMORY, PASSED, REASONS, TIME_LIMIT, Limits, Outcome
from troll_sandbox.output import Compare, same_output
from troll_sandbox.supervise import Watch, wait_for

#: Wait status, CPU microseconds, whether the work folder is clean, length of output and of errors: `inside/stdio.py`.
REPORT = struct.Struct("<5q")

#: How much of an exception goes into a reason.
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

    A test is passed by an exit status of 0, within the limits, with the expected output (see `same_output`). Expected
    outputs never enter the sandbox; an input enters it after the test before has ended. No test is run after one that
    passed a limit of time or of threads; their reason is "not run".

    Args:
        sandbox: Where to run it. All tests of this program share one, each in a process of its own; one that leaves
            files in the work folder, or that had to be killed with its sandbox, gets the next test a fresh sandbox.
        program: Python source; each test gets an outcome, even if this is no program.
        inputs: T texts for standard input.
        outputs: T expected texts.
        limits: What each test may use; the wall time is for all tests together.
        compare: How outputs are compared; see `same_output`.
        stop_at_failure: Whether no test is run after the first that fails.

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
    limits = replace(limits, output_bytes=max(limits.output_bytes, 4 * longest))  # which leaves room for white space
    left = limits.wall_seconds
    try:
        while len(outcomes) < len(inputs) and not (outcomes and _is_last(outcomes[-1], stop_at_failure)):
            if left <= 0:
                outcomes.append(Outcome(False, REASONS["wall"]))
                break
            with _Runner(sandbox, limits) as runner:
                runner.greet(program)
                runner.watch(replace(limits, wall_seconds=left))
                for text, expected in list(zip(inputs, outputs, strict=True))[len(outcomes) :]:
                    outcomes.append(runner.test(text, expected, compare))
                    if not runner.clean or _is_last(outcomes[-1], stop_at_failure):
                        break
                left -= runner.seconds
    except SandboxError as error:
        error.ended = outcomes
        raise
    return outcomes + [NOT_RUN] * (len(inputs) - len(outcomes))


def _is_last(outcome: Outcome, stop_at_failure: bool) -> bool:
    return (outcome.reason in REASONS.values() and outcome != OUT_OF_MEMORY) or (stop_at_failure and not outcome.passed)


class _Runner:
    """One sandbox that tests one program; `clean` until it cannot be used for another test."""

    def __init__(self, sandbox: Launcher, limits: Limits) -> None:
        self.clean = True
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        try:
            folder = ["/input"] if sandbox.isolated else []
            self._process: Process = sandbox.start("stdio", folder, limits=limits, stdin=theirs, stdout=ours)
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(theirs)
            os.close(ours)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self.watch(limits)

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()
        self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._to)
        os.close(self._from)

    def watch(self, limits: Limits) -> None:
        """Watches it from now on."""
        self._limits = limits
        self._watch = Watch([self._process], limits)

    @property
    def seconds(self) -> float:
        """Wall time that counts, since it has been watched."""
        return self._watch.seconds

    def greet(self, program: str) -> None:
        """Sends the program and hears that the sandbox stands, before which nothing of the program's can run.

        Raises:
            SandboxError: It does not.
        """
        try:
            self._send(_message(program))
            self._receive(1)
        except _LimitError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from None

    def test(self, text: str, expected: str, compare: Compare) -> Outcome:
        """The outcome of one test.

        Raises:
            SandboxError: There is none.
        """
        self._watch.restart()
        try:
            self._send(_message(text))
            status, microseconds, clean, *lengths = REPORT.unpack(self._receive(REPORT.size))
            output, errors = (self._receive(length) for length in lengths)
            self.clean = bool(clean)
            seconds = microseconds / 1e6 if self._process.exact else self._watch.cpu_seconds
            outcome = _ended(status, seconds, output, errors, self._limits)
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
            return Outcome(False, "wrong answer")
        return outcome

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
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
            raise SandboxError("the sandbox sent nonsense")
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
        while not wait_for(descriptor, self._watch.period, event):
            if verdict := self._watch.verdict():
                raise _LimitError(REASONS[verdict])


class _LimitError(Exception):
    """The program has passed a limit; the message is the test's reason."""


def _message(text: str) -> bytes:
    data = _bytes(text)
    return len(data).to_bytes(8, "little") + data


def _bytes(text: str) -> bytes:
    # Text that UTF-8 cannot hold becomes bytes that are not UTF-8: a program with it does not compile, and what a
    # program reads and prints again is the same bytes.
    return text.encode("utf-8", "surrogatepass")


def _ended(status: int, cpu_seconds: float, output: bytes, errors: bytes, limits: Limits) -> Outcome:
    """The outcome of a test from its wait status and how much it used; whether it printed the right thing is left.

    Raises:
        SandboxError: It was killed from outside, for lack of memory for one: programs cannot send SIGKILL, not to
            themselves.
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
    """Why a program failed, by its exit status, negative for a signal, and what it wrote to standard error."""
    if code < 0:
        return f"killed by signal {-code}"
    last = (errors.strip().splitlines() or [""])[-1]
    if last.startswith("MemoryError"):
        return OUT_OF_MEMORY.reason
    return f"raised {last[:REASON_LENGTH]}" if code == 1 and last else f"exit status {code}"
