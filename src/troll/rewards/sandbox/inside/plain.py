"""Runs inside the sandbox: a program and its tests in one process, as in one file.

Standard input holds what `troll.rewards.sandbox.functions` sends; standard output hears that the sandbox stands, and
then of each test, in a line that begins with a mark. The program shares this process, so it can say all that itself.
"""

from __future__ import annotations

import json
import os
import sys

import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

end, write = os._exit, os.write  # which the program may overwrite


def outcomes(job: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields for each test, as far as they are reached, whether it passed and why not."""
    module = sys.modules["solution"] = type(sys)("solution")  # as the harnesses of the data sets load programs
    tests = sys.modules["tests"] = type(sys)("tests")
    space = vars(tests)
    try:
        exec(compile(job["source"], "solution.py", "exec", dont_inherit=True), vars(module))
        space.update({**vars(module), "__name__": "tests"})
        exec(compile(job["setup"], "tests.py", "exec", dont_inherit=True), space)
        space.update({name: vars(module)[name] for name in job["names"] if name in vars(module)})
    except BaseException as error:
        yield from [(False, reason(error))] * len(job["tests"])
        return
    for test in job["tests"]:
        try:
            exec(compile(test, "tests.py", "exec", dont_inherit=True), space)
            yield True, "passed"
        except BaseException as error:
            yield False, reason(error)
            if job["stop_at_failure"]:
                return


def reason(error: BaseException) -> str:
    """Why a test failed, in a few words."""
    if isinstance(error, AssertionError):
        return "wrong answer"
    if isinstance(error, MemoryError):
        return "memory limit"
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"raised {type(error).__name__}{text and ': '}{text}"[:200]


def main() -> None:
    """Reports on the tests, one after the other."""
    confine.die_with_parent()
    confine.confine(sys.argv[1])
    confine.main_module()
    with open(0, encoding="utf-8", closefd=False) as file:
        job = json.load(file)
    report = os.dup(1)
    write(report, b"+")  # the sandbox stands
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    mark, dumps = job.pop("mark"), json.dumps
    for outcome in outcomes(job):
        write(report, f"{mark}{dumps(outcome)}\n".encode())
    end(0)


main()
