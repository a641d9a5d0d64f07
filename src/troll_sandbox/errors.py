"""Errors that kept a program from being tested. They are not verdicts: [Executor][troll_sandbox.Executor] retries."""

from __future__ import annotations

from collections.abc import Sequence

from troll_sandbox.limits import Outcome


class SandboxError(RuntimeError):
    """No sandbox can be made here, or the machine kept a program from being tested; the message says why.

    Args:
        message: One line.
        ended: Outcomes of the first tests by standard input, which a retry does not run again.
    """

    def __init__(self, message: str, ended: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.ended = list(ended)


class StarvedError(SandboxError):
    """A program ran for several times its wall limit, while other processes used the CPU for most of the time."""


class KilledError(SandboxError):
    """A program was killed from outside.

    Args:
        outcomes: The outcomes of all tests, in case the program is the cause.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__("a program was killed from outside")
        self.outcomes = list(outcomes)
