"""Runs inside the sandbox: a program and its tests in one process, as in one file.

Standard input holds what `troll_sandbox.function_calls` sends; standard output hears that the sandbox stands, and
then of each test, in a line that begins with a mark. The program shares this process, so it can say all that itself.
"""

from __future__ import annotations

import json
import os
import sys

import confine
from one_process import outcomes

end, write = os._exit, os.write  # which the program may overwrite


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
