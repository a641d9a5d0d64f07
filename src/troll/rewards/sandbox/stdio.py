"""Tests by standard input and output: the program prints, and what it printed is compared outside its reach."""

from __future__ import annotations

import os
import re
import select
import struct
from collections.abc import Sequence

from troll.rewards.sandbox.bubblewrap import Process, Sandbox, SandboxError, insistently
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.supervise import Watch, wait_for

#: Wait status, CPU microseconds, whether the work folder is clean, length of output and of errors: `inside/stdio.py`.
REPORT = struct.Struct("<5q")

#: Of tests that are killed with their sandbox.
REASONS = {"cpu": "time limit", "idle": "idle limit", "wall": "wall limit"}

#: How much of an exception goes into a reason.
REASON_LENGTH = 200

#: Numbers that differ by no more than this, absolutely or relative to the expected one, are equal.
TOLERANCE = 1e-6

#: Longer tokens are texts: what a program prints may be one number of megabytes.
NUMBER_LENGTH = 400

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def run_stdio(
    sandbox: Sandbox,
    program: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    limits: Limits,
) -> list[Outcome]:
    """Runs a program once per input and compares what it prints.

    A test is passed by an exit status of 0, within the limits, with the expected output (see `same_output`). Expected
    outputs never enter the sandbox; an input enters it after the test before has ended. No test is run after one that
    passed a limit of time; their reason is "not run".

    Args:
        sandbox: Where to run it. All tests of this program share one, each in a process of its own; one that leaves
            files in the work folder, or that had to be killed with its sandbox, gets the next test a fresh sandbox.
        program: Python source; whatever it holds, each test gets an outcome.
        inputs: T texts for standard input.
        outputs: T expected texts.
        limits: Of each test.

    Returns:
        T outcomes.

    Raises:
        SandboxError: A sandbox could not be started, three times in a row.
        ValueError: There are not as many inputs as outputs.
    """
    if len(inputs) != len(outputs):
        raise ValueError(f"as many inputs as outputs are needed, got {len(inputs)} and {len(outputs)}")
    outcomes: list[Outcome] = []
    while len(outcomes) < len(inputs):
        with insistently(lambda: _start(sandbox, program, limits)) as runner:
            while runner.clean and len(outcomes) < len(inputs):
                number = len(outcomes)
                outcomes.append(runner.test(inputs[number], outputs[number]))
                if outcomes[-1].reason in REASONS.values():
                    return outcomes + [Outcome(False, "not run")] * (len(inputs) - len(outcomes))
    return outcomes


def _start(sandbox: Sandbox, program: str, limits: Limits) -> _Runner:
    runner = _Runner(sandbox, program, limits)
    try:
        runner.greet()
    except BaseException as error:
        runner.close()
        if isinstance(error, _Broken):
            raise SandboxError(str(error)) from None
        raise
    return runner


class _Runner:
    """One sandbox that tests one program; `clean` until it cannot be used for another test."""

    def __init__(self, sandbox: Sandbox, program: str, limits: Limits) -> None:
        self.clean = True
        self._limits = limits
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        try:
            self._process: Process = sandbox.start("stdio", limits=limits, stdin=theirs, stdout=ours)
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(theirs)
            os.close(ours)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._watch = Watch([self._process], limits)
        self._program = program

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.end()
        self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._to)
        os.close(self._from)

    def greet(self) -> None:
        """Sends the program and hears that the sandbox stands, before which nothing of the program's can run."""
        self._send(_message(self._program))
        self._receive(1)

    def test(self, text: str, expected: str) -> Outcome:
        self._watch.restart()
        try:
            self._send(_message(text))
            status, microseconds, clean, *lengths = REPORT.unpack(self._receive(REPORT.size))
            output, errors = (self._receive(length) for length in lengths)
        except _Broken as broken:
            self.clean = False
            return Outcome(False, str(broken))
        self.clean = bool(clean)
        return judge(status, microseconds / 1e6, output, errors, expected, self._limits)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._to, select.POLLOUT)
            try:
                view = view[os.write(self._to, view[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise _Broken("the sandbox ended early") from None

    def _receive(self, length: int) -> bytes:
        if not 0 <= length <= self._limits.output_bytes + REPORT.size + 2000:
            raise _Broken("the sandbox sent nonsense")
        parts = []
        while length:
            self._wait(self._from, select.POLLIN)
            part = os.read(self._from, min(length, 1 << 20))
            if not part:
                raise _Broken("the sandbox ended early")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int) -> None:
        while not wait_for(descriptor, self._watch.period, event):
            if verdict := self._watch.verdict():
                raise _Broken(REASONS[verdict])


class _Broken(Exception):
    """The conversation with a sandbox is over; the message is the test's reason."""


def _message(text: str) -> bytes:
    # Text that UTF-8 cannot hold becomes bytes that are not UTF-8: the program's own compilation or reading fails.
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


def judge(status: int, cpu_seconds: float, output: bytes, errors: bytes, expected: str, limits: Limits) -> Outcome:
    """The outcome of a test from its wait status and what it wrote."""
    code = os.waitstatus_to_exitcode(status)
    if cpu_seconds > limits.cpu_seconds:
        return Outcome(False, "time limit")
    if len(output) >= limits.output_bytes:
        return Outcome(False, "output limit")
    if code < 0:
        return Outcome(False, f"killed by signal {-code}")
    if code > 0:
        return Outcome(False, _failure(code, errors))
    if not same_output(output.decode("utf-8", "surrogateescape"), expected):
        return Outcome(False, "wrong answer")
    return Outcome(True, "passed")


def _failure(code: int, errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return f"exit status {code}"
    if lines[-1].startswith("MemoryError"):
        return "memory limit"
    return f"raised {lines[-1][:REASON_LENGTH]}" if code == 1 else f"exit status {code}"


def same_output(actual: str, expected: str) -> bool:
    """Whether an output counts as the expected one.

    Blank lines at the end are ignored, and so is how much white space separates the tokens of a line or ends it. There
    must be as many lines, each with as many tokens. Tokens are equal as texts; where the expected one is a decimal
    fraction or has an exponent, also as numbers, to 1e-6 absolutely or relatively. An expected integer is compared as a
    text.
    """
    ours, theirs = (text.rstrip().split("\n") for text in (actual, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(actual: str, expected: str) -> bool:
    ours, theirs = actual.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _same_token(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if expected.lstrip("+-").isdigit() or not (_is_number(expected) and _is_number(actual)):
        return False
    value, target = float(actual), float(expected)
    return abs(value - target) <= TOLERANCE * max(1.0, abs(target))  # False where one of them is infinite


def _is_number(token: str) -> bool:
    return len(token) <= NUMBER_LENGTH and _NUMBER.fullmatch(token) is not None
