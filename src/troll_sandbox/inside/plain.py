"""Runs inside the sandbox: a program and its tests in one process, as in one file.

Standard input is the job from `troll_sandbox.function_calls`. Standard output reports that the sandbox has started, and
then one outcome a line, each after a mark. The program shares this process, so it can write all this itself.
"""

from __future__ import annotations

import json
import os
import sys

import confine
from one_process import outcomes

end, write = os._exit, os.write  # the program may overwrite them


def main() -> None:
    """Reports the outcomes, one after the other."""
    confine.die_with_parent()
    confine.confine(sys.argv[1])
    confine.main_module()
    with open(0, encoding="utf-8", closefd=False) as file:
        job = json.load(file)
    report = os.dup(1)
    write(report, b"+")  # the sandbox has started
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    mark, dumps = job.pop("mark"), json.dumps
    for outcome in outcomes(job):
        write(report, f"{mark}{dumps(outcome)}\n".encode())
    end(0)


main()
