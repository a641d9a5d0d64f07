"""Why a program could not be tested. None of this is a verdict: [Executor][troll_sandbox.Executor] tries again."""

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
    """A program lasted for several wall budgets, and for most of that time other processes had the CPU."""


class KilledError(SandboxError):
    """A program was killed from outside, or ended as if it had been.

    Args:
        outcomes: The outcomes of all tests, in case the program killed itself.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__("a program was killed from outside")
        self.outcomes = list(outcomes)
