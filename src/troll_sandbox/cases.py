"""The tests of a program, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from troll_sandbox.output import Compare


@dataclass(frozen=True)
class CodeTests:
    """Tests that are code: lists of asserts, or a function that checks.

    Attributes:
        tests: Source code of each test.
        setup: Source code that runs before the first test.
        names: Names that the tests take from the program, even if the setup defines the same name.
        inferred: Further names that the tests take from the program: those that neither the tests nor Python define.
            Import every name that matters for a test, such as a package's comparison, in the setup: otherwise the
            program can define it.
        modules: Modules of the standard library that the tests use without importing them. As in one file, they are
            available if the program has imported them.
        plain: Whether the tests run in the program's own process. Everything works there as in one file, but a program
            can fake its verdict.
    """

    tests: tuple[str, ...]
    setup: str
    names: tuple[str, ...]
    inferred: tuple[str, ...]
    modules: tuple[str, ...]
    plain: bool = False


@dataclass(frozen=True)
class FunctionTests:
    """Calls of one function, compared with what each should return.

    A float allows any number within 1e-6, absolute or relative; `NaN` allows only `NaN`; all else must be equal.
    Tuples count as lists, and a list of one value as that value, because data sets wrap some outputs. Keys of JSON are
    texts: in `inputs`, texts of integers become integers; in `outputs`, the key `"1"` also matches 1, and `"null"`
    matches None. The program can use the names that judges provide, see `docs/reference/rewards.md`.

    Attributes:
        function: The function's name, or that of a method where the program has a class `Solution` instead.
        inputs: Positional arguments of each call.
        outputs: The expected result of each call.
    """

    function: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class StreamTests:
    """Runs of the whole program.

    Attributes:
        inputs: Standard input of each run.
        outputs: The expected standard output of each run.
        compare: Which tokens of a line are equal if they are the same number to 1e-6, absolute or relative. "tokens":
            those where the expected token has a decimal point or an exponent. "numbers": all pairs of numbers, except
            that integers have to be the same.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compare: Compare = "tokens"


Tests = CodeTests | FunctionTests | StreamTests


def number_of(tests: Tests) -> int:
    """The number of tests."""
    return len(tests.tests if isinstance(tests, CodeTests) else tests.inputs)
