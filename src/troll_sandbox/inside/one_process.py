"""Runs a program and its tests in one process, as in one file; used by `plain.py` in a sandbox, and on a server.

The program can find the expected values there, and change the comparison.
"""

from __future__ import annotations

import sys
from functools import partial

from prelude import execute, is_provided

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


def outcomes(job: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields for each test that is reached whether it passed, and the reason."""
    program = _module("solution")  # as the harnesses of the data sets import programs
    run = partial(execute, job["source"], "solution.py", program, is_provided(job))
    if "function" in job:
        tests = _calls(job, program)  # before the program runs, which could replace the comparison's module
        broken = _failure(run)
    else:
        space = _module("tests")
        broken = _failure(run) or _failure(partial(_prepare, job, program, space))
        tests = (partial(execute, source, "tests.py", space, False) for source in job["tests"])
    for test in tests:
        failure = broken or _failure(test)
        yield not failure, failure or "passed"
        if failure and job["stop_at_failure"]:
            return


def _calls(job: dict[str, Any], program: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Tests that call one function, or a method of `Solution`."""
    from values import check, integer_keys  # not needed by other tests

    name = job["function"]

    def call(arguments: list[Any], expected: Any) -> None:
        function = program[name] if name in program else getattr(program["Solution"](), name)
        check(function(*map(integer_keys, arguments)), expected)

    return (partial(call, *test) for test in zip(job["inputs"], job["outputs"], strict=True))


def _prepare(job: dict[str, Any], program: dict[str, Any], space: dict[str, Any]) -> None:
    """Puts the names of the program and of the setup into the module of the tests."""
    space.update({**program, "__name__": "tests"})
    del space["__builtins__"]  # the program's may have more names than Python's
    execute(job["setup"], "tests.py", space, False)
    # The setup may define the same name, because a prompt holds the signature.
    space.update({name: program[name] for name in job["names"] if name in program})


def _module(name: str) -> dict[str, Any]:
    """The namespace of a new module in `sys.modules`, where data classes resolve their annotations."""
    module = sys.modules[name] = type(sys)(name)
    return vars(module)


def _failure(action: Callable[[], object]) -> str | None:
    """Why it failed, in a few words; None if it did not."""
    try:
        action()
    except AssertionError:
        return "wrong answer"
    except MemoryError:
        return "memory limit"
    except BaseException as error:
        try:
            text = str(error)
        except BaseException:
            text = ""
        return f"raised {type(error).__name__}{text and ': '}{text}"[:200]
    return None
