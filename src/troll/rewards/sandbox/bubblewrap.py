"""The sandbox: one fresh set of Linux namespaces per program, made by bubblewrap."""

from __future__ import annotations

import compileall
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from troll.rewards.sandbox.limits import Limits
from troll.rewards.sandbox.seccomp import filter_program

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

#: Seconds after each failed start.
PAUSES = (0.1, 1.0, 0.0)

INSTALL = "install it (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
ALLOW = "see docs/sandbox.md for what to allow, on Ubuntu and in containers above all"


class SandboxError(RuntimeError):
    """There can be no sandbox here; the message says what to install or to allow."""


T = TypeVar("T")


def insistently(start: Callable[[], T]) -> T:
    """Starts something up to three times: a machine may be short of processes or memory for a moment.

    Raises:
        SandboxError: Each attempt raised one.
    """
    for pause in PAUSES:
        try:
            return start()
        except SandboxError:
            time.sleep(pause)
    raise SandboxError("the sandbox no longer starts, although it did at first: is the machine out of memory?")


class Process(subprocess.Popen[bytes]):
    """A running sandbox.

    Attributes:
        work_folder: The folder that is the program's own where there is no isolation; to be removed after it has ended.
    """

    work_folder: str | None = None

    def end(self) -> float:
        """Kills whatever is left of it and reaps it; returns the CPU seconds of what ended by itself."""
        cpu_seconds = 0.0
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            try:
                _, status, usage = os.wait4(self.pid, 0)
            except ChildProcessError:  # the caller reaps whatever child has ended
                self.returncode = 255
            else:
                self.returncode = os.waitstatus_to_exitcode(status)
                cpu_seconds = usage.ru_utime + usage.ru_stime
        if self.work_folder is not None:
            with contextlib.suppress(RecursionError):  # a program can nest folders without end
                shutil.rmtree(self.work_folder, ignore_errors=True)
        return cpu_seconds


class Sandbox:
    """Starts scripts of `inside/`, each isolated from the user, the network and every other.

    Inside are: a read-only /usr and interpreter, the packages, and a work folder of bounded size, /tmp, which is the
    only place to write to. There is no /proc, /sys or /home, nothing of /etc but the list of libraries, no
    network, no process of anyone else's, and no environment but `ENVIRONMENT`. The user is nobody and has no
    capabilities.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.
        run_without_isolation: Run programs as plain processes of the user in a temporary folder, with the same
            limits and system call filter. They can then read and change whatever the user can.

    Raises:
        SandboxError: bubblewrap is missing or too old, namespaces are forbidden, or this is not Linux on x86_64 or
            aarch64. Found out by one real run.
    """

    def __init__(self, *, packages: Sequence[Path] = (), run_without_isolation: bool = False) -> None:
        self.isolated = not run_without_isolation
        self._packages = tuple(Path(folder).resolve() for folder in packages)
        for folder in self._packages:
            if not folder.is_dir():
                raise SandboxError(f"packages: {folder} is not a folder")
        # What scripts import is not compiled again in every sandbox; an installed package has this done already.
        compileall.compile_dir(INSIDE, quiet=2)
        self._interpreter = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
        try:
            self._filter = filter_program().hex()
        except ValueError as error:
            raise SandboxError(f"the sandbox cannot run here: {error}") from None
        if run_without_isolation:
            warnings.warn(
                "run_without_isolation=True: programs written by a model now run as your user, without a sandbox; "
                "they can read, change and delete your files and use the network",
                RuntimeWarning,
                stacklevel=2,
            )
            self._folder = tempfile.TemporaryDirectory(prefix="troll-programs-")
        else:
            self._prefix = self._isolation()
        self._try()

    def start(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        limits: Limits,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Starts a script in a fresh sandbox.

        The script's first argument is for `confine.confine`, which it calls before it runs anything of the program's.
        The sandbox lives no longer than the thread that starts it, which should therefore see it to its `end`.

        Args:
            script: Name of a file in `inside/`, without ".py".
            arguments: Further arguments of the script.
            limits: What the program may use.
            stdin: File descriptor, or a constant of `subprocess`; None is an empty one.
            stdout: The same; None discards.
            stderr: The same.
            pass_fds: File descriptors that stay open inside, under the same numbers.

        Raises:
            SandboxError: The sandbox could not be started.
        """
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # bubblewrap inherits it, and would wait for ever
            raise SandboxError("the sandbox cannot run while SIGCHLD is ignored: set it to SIG_DFL")
        command = [self._interpreter, *INTERPRETER_FLAGS]
        environment = dict(ENVIRONMENT)
        folder = None
        if self.isolated:
            command = [*self.command(limits), *command]
            scripts, packages = "/inside", [f"/packages/{index}" for index in range(len(self._packages))]
        else:
            folder = environment["HOME"] = environment["TMPDIR"] = tempfile.mkdtemp(dir=self._folder.name)
            scripts, packages = str(INSIDE), [str(path) for path in self._packages]
        if packages:
            environment["PYTHONPATH"] = os.pathsep.join(packages)
        try:
            process = Process(
                [*command, f"{scripts}/{script}.py", self._settings(limits), *arguments],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.DEVNULL if stdout is None else stdout,
                stderr=subprocess.DEVNULL if stderr is None else stderr,
                pass_fds=tuple(pass_fds),
                cwd=folder or "/",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"cannot start {command[0]}: {error.strerror}") from error
        process.work_folder = folder
        return process

    def command(self, limits: Limits) -> list[str]:
        """Bubblewrap's command line, to which a program's is appended."""
        work = ["--size", str(limits.disk_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
        return [*self._prefix, *work, "--"]

    def _settings(self, limits: Limits) -> str:
        # Outside a user namespace of its own, the kernel would count everything that the user runs. The process that
        # starts a test counts as one.
        threads = limits.threads + 1 if self.isolated else 0
        cpu_seconds = math.ceil(2 * limits.cpu_seconds) + 1  # for when nobody watches: see supervise.py
        numbers = (cpu_seconds, limits.memory_bytes, limits.output_bytes, threads)
        return ",".join((*map(str, numbers), self._filter))

    def _isolation(self) -> list[str]:
        """The part of bubblewrap's command line that is the same for all programs."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"the sandbox needs bubblewrap (the program bwrap): {INSTALL}")
        # No new session inside: what runs there stays in the process group that `Process.end` kills.
        command = [bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", *_system()]
        shown = [Path("/usr")]
        for folder in (Path(sys.base_prefix).resolve(), Path(self._interpreter).parent):
            if not any(folder.is_relative_to(other) for other in shown):
                command += ["--ro-bind", str(folder), str(folder)]
                shown.append(folder)
        command += ["--ro-bind", str(INSIDE), "/inside"]
        for index, folder in enumerate(self._packages):
            command += ["--ro-bind", str(folder), f"/packages/{index}"]
        return command

    def _try(self) -> None:
        process = self.start("ready", limits=Limits(), stdin=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"the sandbox did not start within {TRIAL_SECONDS:.0f} seconds") from None
        finally:
            process.end()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if output != b"ready":
            raise SandboxError(_refusal(errors.decode(errors="replace"), process.returncode))


def _refusal(errors: str, status: int) -> str:
    lines = errors.strip().splitlines() or [f"exit status {status}"]
    if "Unknown option" in lines[0]:
        return f"the sandbox needs bubblewrap 0.7 or later ({lines[0]}): update it"
    if "ModuleNotFoundError" in lines[-1]:
        return f"the sandbox needs a complete Python ({lines[-1]}): {sys.base_prefix} lacks a standard module"
    return f"the sandbox does not start ({lines[-1]}): namespaces may be forbidden here; {ALLOW}"


def _system() -> list[str]:
    """Binds the system's libraries, on systems with a merged /usr and without, and the harmless devices."""
    options = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in (Path("/lib"), Path("/lib64"), Path("/lib32"), Path("/libx32")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for device in ("null", "zero", "urandom"):
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return options
