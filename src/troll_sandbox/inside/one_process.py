"""Runs a program and its tests in one process, as in one file; used by `plain.py` in a sandbox, and on a server.

The program can find the expected values there, change the comparison, and report outcomes itself.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from prelude import execute, is_provided

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


def main(greeting: bytes = b"") -> None:
    """Tests the program of a job, and ends this process.

    Standard input is the job from `troll_sandbox.function_calls`. Standard output gets the greeting, and then each
    outcome as a line of JSON after the job's mark. All names are local, so that the program does not find them in
    `__main__`.
    """
    end, write, dumps = os._exit, os.write, json.dumps  # the program may overwrite them
    with open(0, encoding="utf-8", closefd=False) as file:
        job = json.load(file)
    mark, report = job.pop("mark"), os.dup(1)
    write(report, greeting)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    for outcome in outcomes(job):
        write(report, f"{mark}{dumps(outcome)}\n".encode())
    end(0)


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
    """The reason for a failure, in a few words; None for a pass."""
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
