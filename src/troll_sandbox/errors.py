"""What keeps a program from being tested. None of it is a verdict: [Executor][troll_sandbox.Executor] tries again."""

from __future__ import annotations

from collections.abc import Sequence

from troll_sandbox.limits import Outcome


class SandboxError(RuntimeError):
    """There can be no sandbox here, or the machine kept a program from being tested; the message says why.

    Args:
        message: One line.
        ended: Outcomes of the first tests by standard input, which need not be run again.
    """

    def __init__(self, message: str, ended: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.ended = list(ended)


class StarvedError(SandboxError):
    """A program computed or waited for a CPU for several wall budgets, and others had the CPU for most of that time."""


class KilledError(SandboxError):
    """A program was killed from outside, or ended in a way that looks like it.

    Args:
        outcomes: The outcomes of all tests if that was the program's own doing.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__("a program was killed from outside")
        self.outcomes = list(outcomes)
