"""Runs a program and its tests in one process, on a server; see `fusion.py`. Sent as text, it imports nothing."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # on the server, this stands in front
    from troll.rewards.sandbox.inside.values import check, integer_keys


def main(job: dict[str, Any], report: Callable[[bool, str], object]) -> None:
    """Reports whether each test is passed, and why not."""
    # Dataclasses look for their module by its name.
    sys.modules["program"] = ModuleType("program")
    program = vars(sys.modules["program"])
    broken = _attempt(lambda: exec(compile(job["program"], "program", "exec"), program))
    for test in _calls(job, program) if "function" in job else _sources(job, program):
        failure = broken or _attempt(test)
        report(not failure, failure or "passed")
        if failure and job["stop_at_failure"]:
            return


def _calls(job: dict[str, Any], program: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Tests that call one function, or a method of `Solution`."""
    name = job["function"]

    def call(arguments: list[Any], expected: Any) -> None:
        function = program[name] if name in program else getattr(program["Solution"](), name)
        check(function(*map(integer_keys, arguments)), expected)

    for arguments, expected in zip(job["inputs"], job["outputs"], strict=True):
        yield partial(call, arguments, expected)


def _sources(job: dict[str, Any], program: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Tests that are code, after the program as in one file."""
    space = {**program, "__name__": "tests"}

    def prepare() -> None:
        exec(job["setup"], space)
        # The setup may define the same name: a prompt holds the signature.
        space.update({name: program[name] for name in job["names"] if name in program})

    def run(test: str) -> None:
        if unprepared:
            raise RuntimeError(unprepared)
        exec(test, space)

    unprepared = _attempt(prepare)
    for test in job["tests"]:
        yield partial(run, test)


def _attempt(action: Callable[[], object]) -> str | None:
    """Why it failed, None where it did not."""
    try:
        action()
    except AssertionError:
        return "wrong answer"
    except MemoryError:
        return "memory limit"
    except BaseException as error:
        return f"raised {type(error).__name__}: {error}"[:200]
    return None


def start() -> None:
    """Reads the job before the program can, and keeps what the program prints out of the report."""
    job = json.loads(sys.stdin.read())
    mark, out, nothing = job.pop("mark"), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    main(job, lambda *outcome: os.write(out, (mark + json.dumps(outcome) + "\n").encode()))
    os._exit(0)


if __name__ == "__main__":
    start()
