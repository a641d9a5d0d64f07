"""Code shared by bubblewrap's and gVisor's sandboxes: starting and ending one."""

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
from typing import Any

from troll_sandbox.control_groups import MemoryGroup, MemoryGroups, groups_folder
from troll_sandbox.errors import SandboxError
from troll_sandbox.limits import MEBIBYTE, Limits
from troll_sandbox.seccomp import KILLED_STATUS, filter_program

INSIDE = Path(__file__).parent / "inside"

#: The environment of programs. The hash seed is fixed, so that verdicts can be repeated. Libraries of linear algebra
#: get one thread, and the allocator one arena, because both reserve address space for each.
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}

#: Without the user's packages and without the site module; PYTHONPATH is set here.
INTERPRETER_FLAGS = ("-s", "-S", "-B")

#: Enough for a slow start on a very busy machine: this bounds a start that hangs.
TRIAL_SECONDS = 60.0
NO_START = "the sandbox did not start in time"

#: With this score, sandboxes are the first that the kernel kills when memory runs out.
OUT_OF_MEMORY_SCORE = 1000


class Process(subprocess.Popen[bytes]):
    """A running sandbox; as a context, it is closed at the end.

    Attributes:
        folder: Removed after the end: the sandbox's files, or the program's work folder where nothing isolates.
        own_threads: Number of threads that are not the program's.
        exact: Whether the CPU time that is measured inside is exact.
        most: Bound on the memory of the whole sandbox in bytes; None if there is none.
        group: Its control group; None if it has none or has ended.
        groups: Takes the group back at the end.
    """

    folder: str | None = None
    group: MemoryGroup | None = None
    groups: MemoryGroups | None = None
    own_threads = 1
    exact = True
    most: int | None = None
    _cpu_seconds = 0.0

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process because of the bound on its memory; call it before `end`."""
        return self.group is not None and self.group.is_exceeded()

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within some seconds; call it before `end`."""
        end = time.monotonic() + seconds
        while self.returncode is None and not self._reap(os.WNOHANG):
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True

    def killed(self, seconds: float) -> bool:
        """Whether it ends within some seconds by a SIGKILL that did not come from here; call it before `end`."""
        return self.has_ended(seconds) and self.returncode in (-signal.SIGKILL, *KILLED_STATUS)

    def end(self) -> float:
        """Kills and reaps its remaining processes; returns the CPU seconds of those that ended by themselves."""
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

    def close(self) -> None:
        """Ends it, and closes this process's ends of its pipes."""
        self.end()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reap(self, options: int) -> bool:
        """Whether it has ended; its exit status and CPU time are kept then."""
        try:
            pid, status, usage = os.wait4(self.pid, options)
        except ChildProcessError:  # something else in this process reaps all children
            self.returncode = 255
            return True
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_seconds = usage.ru_utime + usage.ru_stime
        return pid != 0


class Launcher(ABC):
    """Starts scripts of `inside/`, each in its own sandbox, and can kill all sandboxes at once.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.

    Attributes:
        isolated: Whether programs are isolated from the user.
        interpreter: The Python that runs the scripts.
        packages: The folders of packages, by their paths inside.

    Raises:
        SandboxError: A folder is missing, or this is not Linux on x86_64 or aarch64.
    """

    isolated = True

    #: Memory of a sandbox on top of the program's: the process that starts tests, input, buffers of the kernel.
    own_bytes = 128 * MEBIBYTE

    def __init__(self, packages: Sequence[Path]) -> None:
        self.packages = {f"/packages/{index}": Path(folder).resolve() for index, folder in enumerate(packages)}
        for folder in self.packages.values():
            if not folder.is_dir():
                raise SandboxError(f"packages: {folder} is not a folder")
        # Otherwise every sandbox compiles the scripts' imports again. Installing a package does this already.
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

        The script gets one more argument in front, which it passes to `confine.confine` before it runs the program.
        The sandbox ends with the thread that starts it, so that thread should wait for its end.

        Args:
            script: Name of a file in `inside/`, without ".py".
            arguments: Further arguments of the script.
            limits: The limits of the program.
            stdin: File descriptor, or a constant of `subprocess`; None is an empty input.
            stdout: File descriptor, or a constant of `subprocess`; None discards the output.
            stderr: File descriptor, or a constant of `subprocess`; None discards the errors.

        Raises:
            SandboxError: The sandbox could not be started, or `stop` has been called.
        """
        names = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        streams = {name: subprocess.DEVNULL if stream is None else stream for name, stream in names.items()}
        if not self._stopped:
            process = self._launch(script, arguments, limits, streams)
            with self._lock:
                self._running.add(process)
            if not self._stopped:
                return process
            process.close()  # `stop` was called meanwhile
        raise SandboxError("the sandbox was closed")

    def stop(self) -> None:
        """Kills all sandboxes and starts no more. The threads that started them reap them."""
        with self._lock:
            self._stopped = True
            running = [process for process in self._running if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _settings(self, limits: Limits, *, cpu_seconds: int, threads: int) -> str:
        """The argument for `confine.confine`, which takes CPU time and threads (0: not limited) from here."""
        numbers = (cpu_seconds, limits.memory_bytes, limits.output_bytes, threads)
        return ",".join((*map(str, numbers), self._filter))

    def _bound(self, process: Process, pid: int | None, script: str, limits: Limits) -> None:
        """Bounds the memory of a sandbox, whose first process is `pid`; when memory runs out, it is killed first.

        The judge may need more memory than the program that it judges, and has no bound.
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
    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: dict[str, Any]) -> Process:
        """Starts it; `streams` are the standard streams, as arguments of `subprocess.Popen`."""

    def _trial(self, modules: Sequence[str] = ()) -> str | None:
        """Starts a sandbox; returns why it does not start or which library its modules lack, None if all is well."""
        pipe = subprocess.PIPE
        with self.start("ready", modules, limits=Limits(), stdin=None, stdout=pipe, stderr=pipe) as process:
            try:
                output, errors = process.communicate(timeout=TRIAL_SECONDS)
            except subprocess.TimeoutExpired:
                raise SandboxError(NO_START) from None
        if output == b"ready":
            return None
        return self._refusal(errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"])

    @abstractmethod
    def _refusal(self, errors: list[str]) -> str:
        """The reason why it does not start, from the lines of its errors."""
