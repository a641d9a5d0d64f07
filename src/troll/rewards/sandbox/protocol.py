"""What tests programs: one call, which bubblewrap, a server or a function of the user's can answer."""

from __future__ import annotations

from typing import Protocol

from troll.rewards.program import CodeTests, Tests
from troll.rewards.sandbox.limits import Limits, Outcome


class Sandbox(Protocol):
    """Tests a program where it can do no harm; any function of this signature is one.

    It is called by several threads at a time.
    """

    def __call__(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """Tests a program.

        Args:
            program: Python source, as a model wrote it.
            tests: The tests that the program has to pass.
            limits: What it may use.
            stop_at_failure: Whether the tests after the first failing one may be left out.

        Returns:
            An outcome per test; "not run" of those left out.

        Raises:
            SandboxError: The program could not be tested, for a reason that is not the program's. It is tried again.
        """
        ...


def number_of(tests: Tests) -> int:
    """How many tests there are."""
    return len(tests.tests if isinstance(tests, CodeTests) else tests.inputs)
