"""The tests of a program, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from troll_sandbox.output import Compare


@dataclass(frozen=True)
class CodeTests:
    """Tests that are code: lists of asserts, or a function that checks.

    Attributes:
        tests: Sources, each of them one test.
        setup: Source to run before the first test.
        names: Names that the tests take from the program, even if something else has the same name.
        inferred: Further names that the tests take from the program: those that neither the tests nor Python define.
            Import everything that decides a test, such as a package's comparison, in the setup: otherwise the program
            can define it.
        modules: Modules of the standard library that the tests use without importing them. As in one file, they are
            available if the program has imported them.
        plain: Whether the tests run in the program's own process, where everything works as in one file, but a program
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
    """Calls of one function; the program finds the names that judges provide, see `docs/tasks.md`.

    Attributes:
        function: Its name; a method of that name where the program has a class `Solution` instead.
        inputs: Positional arguments of each call.
        outputs: What each call returns. Where it is a float, any number is right that differs by no more than 1e-6
            absolutely or relatively; `NaN` is right for `NaN`, and all else has to be equal. Tuples count as lists, and
            a list of one value as that value: the data sets with such tests wrap some of their outputs. They come from
            JSON, whose keys are texts: texts of integers in `inputs` become integers, and in outputs the key `"1"`
            stands for 1 as well, `"null"` for None.
    """

    function: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class StreamTests:
    """Runs of the whole program.

    Attributes:
        inputs: Standard input of each run.
        outputs: Standard output to expect of each.
        compare: Which tokens of a line are equal as numbers, to 1e-6 absolutely or relatively: with "tokens" where the
            expected one is a decimal fraction or has an exponent, with "numbers" wherever both are numbers.
            Two integers have to be the same.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compare: Compare = "tokens"


Tests = CodeTests | FunctionTests | StreamTests


def number_of(tests: Tests) -> int:
    """How many tests there are."""
    return len(tests.tests if isinstance(tests, CodeTests) else tests.inputs)
