"""What runs on this machine, seen from outside of every sandbox."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import Tests
from troll_sandbox.errors import SandboxError
from troll_sandbox.executor import Executor, Job
from troll_sandbox.limits import Limits, Outcome
from troll_sandbox.local import LocalSandbox

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="needs bubblewrap (Debian: apt install bubblewrap)"
)


def running(mark: str) -> list[int]:
    """Processes that have a text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for something that has to come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_until_gone(mark: str, seconds: float = 5.0) -> None:
    """Waits for the kernel to finish what it does after a kill."""
    wait_until(lambda: not running(mark), seconds)


@contextlib.contextmanager
def busy_machine(loops: int) -> Iterator[None]:
    """A machine on which so many others never stop to compute, on the CPUs that this process may use."""
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
    """What an executor finds, which tries again; the sandboxes can be used further."""
    local = LocalSandbox(programs, judges or programs)
    with contextlib.closing(Executor(lambda: (local, None), limits or Limits(), workers=1)) as executor:
        return executor.run([Job(program, tests, stop_at_failure=False)])[0]


def only_program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a shell script the program of that name."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def start_at_the_third_attempt_only(sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all attempts from now on."""
    monkeypatch.setattr("troll_sandbox.executor.FIRST_PAUSE", 0.01)
    starts: list[str] = []
    command = sandbox.command

    def failing() -> list[str]:
        starts.append("start")
        return command() if len(starts) == 3 else ["/bin/false"]

    monkeypatch.setattr(sandbox, "command", failing)
