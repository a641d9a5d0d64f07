"""What starts sandboxes, and what a running one is; `bubblewrap.py` and `gvisor.py` are two ways to make them."""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from troll_sandbox.control_groups import MemoryGroup, MemoryGroups, groups_folder
from troll_sandbox.errors import SandboxError
from troll_sandbox.limits import MEBIBYTE, Limits
from troll_sandbox.seccomp import filter_program

INSIDE = Path(__file__).parent / "inside"

#: What a program finds in its environment. Hashes are fixed, so that verdicts can be repeated; libraries of linear
#: algebra use one thread, and the allocator one arena, because both reserve address space for each.
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}

#: Neither the user's packages nor the site module; PYTHONPATH is ours.
INTERPRETER_FLAGS = ("-s", "-S", "-B")

#: Long enough for the busiest machine: it bounds a hanging start, not a slow one.
TRIAL_SECONDS = 60.0
NO_START = "the sandbox did not start in time"

#: Exit statuses of what was killed; the last one is gVisor's, where it fails itself.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 128)

#: What a sandbox is to the kernel when memory runs out: the first to go.
OUT_OF_MEMORY_SCORE = 1000


class Process(subprocess.Popen[bytes]):
    """A running sandbox.

    Attributes:
        folder: What is to be removed after it has ended: its files, or the program's own folder where nothing isolates.
        own_threads: How many threads its processes may have that are not the program's.
        exact: Whether the CPU time that is measured inside is exact.
        most: Bytes of memory that all of it may use; None where that is not bounded.
        group: Its control group, if it has one and has not ended.
        groups: Where the group comes from, and goes when it has ended.
    """

    folder: str | None = None
    group: MemoryGroup | None = None
    groups: MemoryGroups | None = None
    own_threads = 1
    exact = True
    most: int | None = None
    _cpu_seconds = 0.0

    def out_of_memory(self) -> bool:
        """Whether one of its processes was ended for the bound on the memory of all; to be asked before `end`."""
        return self.group is not None and self.group.is_exceeded()

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; to be asked before `end`."""
        end = time.monotonic() + seconds
        while self.returncode is None and not self._reap(os.WNOHANG):
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True

    def killed(self, seconds: float) -> bool:
        """Whether it ends within some seconds by a SIGKILL that is not this process's.

        To be asked before `end`. A program that is the first process of its sandbox can look like that by its exit
        status, so what is killed twice is not the machine's fault.
        """
        return self.has_ended(seconds) and self.returncode in KILLED

    def end(self) -> float:
        """Kills what is left of it and reaps it; returns the CPU seconds of what ended by itself."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._reap(0)
        if self.groups is not None and self.group is not None:
            self.groups.give_back(self.group)
            self.group = None
        if self.folder is not None:
            with contextlib.suppress(RecursionError):  # a program can nest folders without end
                shutil.rmtree(self.folder, ignore_errors=True)
        return self._cpu_seconds

    def _reap(self, options: int) -> bool:
        """Whether it has ended; its exit status and CPU time are kept then."""
        try:
            pid, status, usage = os.wait4(self.pid, options)
        except ChildProcessError:  # the caller reaps any child that has ended
            self.returncode = 255
            return True
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = usage.ru_utime + usage.ru_stime
        return pid != 0


class Launcher(ABC):
    """Starts scripts of `inside/`, each in a sandbox of its own, all of which can be killed at once.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.

    Attributes:
        isolated: Whether it is one: programs can reach nothing of the user's.
        interpreter: The Python that runs the scripts.
        packages: The folders of packages, by their real paths.

    Raises:
        SandboxError: A folder is missing, or this is not Linux on x86_64 or aarch64.
    """

    isolated = True

    #: What a sandbox may use besides the program: the process that starts tests, input, what the kernel keeps for it.
    own_bytes = 128 * MEBIBYTE

    def __init__(self, packages: Sequence[Path]) -> None:
        self.packages = tuple(Path(folder).resolve() for folder in packages)
        for folder in self.packages:
            if not folder.is_dir():
                raise SandboxError(f"packages: {folder} is not a folder")
        # What scripts import is not compiled again in every sandbox; an installed package has this done already.
        compileall.compile_dir(INSIDE, quiet=2)
        self.interpreter = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
        try:
            self._filter = filter_program().hex()
        except ValueError as error:
            raise SandboxError(f"the sandbox cannot run here: {error}") from None
        groups = groups_folder()
        self._groups = None if groups is None else MemoryGroups(groups)
        self._lock = threading.Lock()
        self._running = weakref.WeakSet[Process]()
        self._stopped = False

    def start(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        limits: Limits,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None = None,
    ) -> Process:
        """Starts a script in a fresh sandbox.

        The script's first argument is for `confine.confine`, which it calls before it runs anything of the program's.
        The sandbox lives no longer than the thread that starts it, which should therefore see it to its `end`.

        Args:
            script: Name of a file in `inside/`, without ".py".
            arguments: Further arguments of the script.
            limits: What the program may use.
            stdin: File descriptor, or a constant of `subprocess`; None is an empty one.
            stdout: File descriptor, or a constant of `subprocess`; None discards what is written.
            stderr: As `stdout`.

        Raises:
            SandboxError: The sandbox could not be started, or `stop` has been called.
        """
        streams = tuple(subprocess.DEVNULL if stream is None else stream for stream in (stdin, stdout, stderr))
        if not self._stopped:
            process = self._launch(script, arguments, limits, streams)
            with self._lock:
                self._running.add(process)
            if not self._stopped:
                return process
            process.end()  # `stop` came meanwhile
        raise SandboxError("the sandbox was closed")

    def stop(self) -> None:
        """Kills what runs, for the threads that started it to reap, and starts nothing more."""
        with self._lock:
            self._stopped = True
            running = [process for process in self._running if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _settings(self, limits: Limits, *, cpu_seconds: int, threads: int) -> str:
        """What `confine.confine` reads; of the limits all but those on CPU time and threads, where 0 is none."""
        numbers = (cpu_seconds, limits.memory_bytes, limits.output_bytes, threads)
        return ",".join((*map(str, numbers), self._filter))

    def _bound(self, process: Process, pid: int | None, script: str, limits: Limits) -> None:
        """Bounds the memory of a sandbox, whose first process is `pid`; if none is left, the kernel ends it first.

        The judge may need more than the program that it judges, and is not bounded.
        """
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
        if script == "judge":
            return
        process.most = limits.memory_bytes + limits.disk_bytes + 2 * limits.output_bytes + self.own_bytes
        if self._groups is not None and pid is not None:
            process.groups, process.group = self._groups, self._groups.take(process.most)
            process.group.add(pid)

    @abstractmethod
    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: tuple[int, ...]) -> Process:
        """Starts it, with three file descriptors for its standard streams."""

    def _trial(self, modules: Sequence[str] = ()) -> str | None:
        """Why a sandbox does not start or lacks what modules need, None where all is well."""
        pipe = subprocess.PIPE
        with self.start("ready", modules, limits=Limits(), stdin=None, stdout=pipe, stderr=pipe) as process:
            try:
                output, errors = process.communicate(timeout=TRIAL_SECONDS)
            except subprocess.TimeoutExpired:
                raise SandboxError(NO_START) from None
            finally:
                process.end()
        if output == b"ready":
            return None
        return self._refusal(errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"])

    @abstractmethod
    def _refusal(self, errors: list[str]) -> str:
        """Why it does not start, by the lines of its errors."""
