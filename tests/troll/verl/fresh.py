"""Programs in processes that have not imported verl yet; they are forks of one that has what verl imports."""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

#: Most of the time of an import of verl goes to these.
PRELOADED = ("torch", "transformers", "ray", "tensordict", "datasets", "peft", "accelerate", "hydra", "fastapi")


#: Runs a program with these variables of the environment: its `code`, and the lines that it `said` in both outputs.
Fresh = Callable[..., Any]


@contextmanager
def started() -> Iterator[Fresh]:
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def fresh(program: str, **environment: str) -> Any:
            print(json.dumps((program, environment)), file=requests, flush=True)
            return SimpleNamespace(**json.loads(answers.readline()))

        yield fresh
        process.kill()  # it has nothing to finish


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
