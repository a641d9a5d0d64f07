"""Runs a program and its tests in one process, on a server; see `fusion.py`. Sent as text, it imports nothing."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


def main(job: dict[str, Any], report: Callable[[bool, str], object]) -> None:
    """Reports whether each test is passed, and why not."""
    program: dict[str, Any] = {"__name__": "program"}
    broken = _attempt(lambda: exec(compile(job["program"], "program", "exec"), program))
    for test in _calls(job, program) if "function" in job else _sources(job, program):
        failure = broken or _attempt(test)
        report(not failure, failure or "passed")
        if failure and job["stop_at_failure"]:
            return


def _calls(job: dict[str, Any], program: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Tests that call one function, or a method of `Solution`."""
    name = job["function"]

    def check(arguments: list[Any], expected: Any) -> None:
        function = program[name] if name in program else getattr(program["Solution"](), name)
        result, expected = _as_lists(function(*map(_integer_keys, arguments))), _integer_keys(expected)
        wrapped = isinstance(expected, list) and len(expected) == 1 and result == _integer_keys(expected[0])
        if not (wrapped or result == expected):
            raise AssertionError

    for arguments, expected in zip(job["inputs"], job["outputs"], strict=True):
        yield partial(check, arguments, expected)


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


def _as_lists(value: Any) -> Any:
    """The value with lists for tuples: what is expected was read from JSON, which has no tuples."""
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _integer_keys(value: Any) -> Any:
    """The value, with integers for keys that JSON could only write as strings."""
    try:
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    except ValueError:
        return value


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
