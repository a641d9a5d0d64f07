"""Programs in processes that have not imported verl yet; they are forks of one that has what verl imports."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import IO, Any

#: Most of the time of an import of verl goes to these.
PRELOADED = ("torch", "transformers", "ray", "tensordict", "datasets", "peft", "accelerate", "hydra", "fastapi")


class Fresh:
    """Runs one program after the other.

    Args:
        requests: Of the process that runs `serve`.
        answers: Likewise.
    """

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def __call__(self, program: str, **environment: str) -> Any:
        """Its `code`, and the `said` lines of both outputs."""
        print(json.dumps((program, environment)), file=self._requests, flush=True)
        return SimpleNamespace(**json.loads(self._answers.readline()))


def serve() -> None:
    """Answers each line of a program and an environment with how it went."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            program, environment = json.loads(line)
            run(program, environment, write)
        os.close(write)
        with os.fdopen(read) as output:
            said = output.read().splitlines()
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "said": said}), file=answers, flush=True)


def run(program: str, environment: dict[str, str], output: int) -> None:
    """The child: ends with the program."""
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    code = 0
    try:
        exec(program, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
