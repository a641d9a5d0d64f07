"""Programs in processes that have not imported verl yet; they are forks of one that has what verl imports."""

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple

#: Most of the time of an import of verl goes to these.
PRELOADED = ("torch", "transformers", "ray", "tensordict", "datasets", "peft", "accelerate", "hydra", "fastapi")


class Done(NamedTuple):
    """A program's exit code, and the lines that it wrote to both outputs."""

    code: int
    said: list[str]


#: Runs a program with these variables of the environment.
Fresh = Callable[..., Done]


@contextmanager
def started() -> Iterator[Fresh]:
    with ProcessPoolExecutor(1, get_context("spawn"), preload) as pool:
        yield lambda program, **environment: pool.submit(run, program, environment).result()


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)


def run(program: str, environment: dict[str, str]) -> Done:
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            os.environ.update(environment)
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            os._exit(code_of(program))
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return Done(os.waitstatus_to_exitcode(status), output.read().splitlines())


def code_of(program: str) -> int:
    code = 0
    try:
        exec(program, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
