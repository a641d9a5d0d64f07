"""The sandbox: one fresh set of Linux namespaces per program, made by bubblewrap."""

from __future__ import annotations

import compileall
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
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
NO_START = "the sandbox did not start in time"

#: Seconds after the first failed start; each further pause is twice as long.
FIRST_PAUSE = 0.1

#: Outside, the user that programs are where this process is root: the kernel does not count the threads of root.
NOBODY = 65534

#: What a sandbox is to the kernel when memory runs out: the first to go.
OUT_OF_MEMORY_SCORE = 1000

#: Modules of the standard library that need libraries of the system.
NEED_LIBRARIES = ("_bz2", "_ctypes", "_curses", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_uuid", "zlib")

INSTALL = "install it (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
ALLOW = "see docs/sandbox.md for what to allow, on Ubuntu and in containers above all"


class SandboxError(RuntimeError):
    """There can be no sandbox here, or the machine kept a program from being tested; the message says why."""


T = TypeVar("T")


def insistently(start: Callable[[], T], seconds: float = Limits().wall_seconds) -> T:
    """Starts something until it succeeds: a machine may be short of processes or memory for as long as a program lasts.

    Args:
        start: Raises `SandboxError` where it should be tried again.
        seconds: For how long, counted from the first attempt: what has failed after a long time is not tried again.

    Raises:
        SandboxError: The last attempt's.
    """
    pause, end = FIRST_PAUSE, time.monotonic() + seconds
    while True:
        try:
            return start()
        except SandboxError as error:
            if time.monotonic() + pause > end:
                raise SandboxError(f"the sandbox no longer starts, or is killed: {error}") from error
        time.sleep(pause)
        pause *= 2


class Process(subprocess.Popen[bytes]):
    """A running sandbox.

    Attributes:
        work_folder: The folder that is the program's own where there is no isolation; to be removed after it has ended.
    """

    work_folder: str | None = None

    def killed(self, seconds: float = 0.0) -> bool:
        """Whether it ends within some seconds by a SIGKILL that is not this process's.

        To be asked before `end`. A program that is the first process of its sandbox can look like that by its exit
        status, so what is killed twice is not the machine's fault.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(seconds) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return False

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


class Bubblewrap:
    """Starts scripts of `inside/`, each isolated from the user, the network and every other.

    Inside are, read-only: the interpreter with its standard library, the folders of the system's libraries, the time
    zones and the packages; and a work folder of bounded size, /tmp, which is the only place to write to. There is no
    /proc, /sys or /home, nothing of /etc but the list of libraries, no network, no process of anyone else's, and no
    environment but `ENVIRONMENT`. The user is nobody and has no capabilities.

    What works here is found out by trial starts. Where this process is root, programs are nobody outside as well, if
    there is such a user here. Where the interpreter needs more of the system than its libraries, all of /usr is shown,
    and a warning says so.

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
            scripts, packages = "/inside", [f"/packages/{index}" for index in range(len(self._packages))]
        else:
            folder = environment["HOME"] = environment["TMPDIR"] = tempfile.mkdtemp(dir=self._folder.name)
            scripts, packages = str(INSIDE), [str(path) for path in self._packages]
        if packages:
            environment["PYTHONPATH"] = os.pathsep.join(packages)
        disk = limits.disk_bytes if self.isolated else 0
        with contextlib.ExitStack() as stack:
            starting = stack.enter_context(_Starting(self._as_nobody)) if self.isolated else None
            left = starting.left_open if starting else -1
            command += [f"{scripts}/enter.py", script, str(disk), str(left), self._settings(limits), *arguments]
            if starting is not None:
                command = [*self.command(), *starting.options, "--", *command]
            try:
                process = Process(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=subprocess.DEVNULL if stdout is None else stdout,
                    stderr=subprocess.DEVNULL if stderr is None else stderr,
                    pass_fds=(*pass_fds, *(starting.theirs if starting else ())),
                    cwd=folder or "/",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"cannot start {command[0]}: {error.strerror}") from error
            process.work_folder = folder
            try:
                _offer_to_the_killer(starting.inside() if starting else process.pid)
            except BaseException:
                process.end()
                raise
        return process

    def _settings(self, limits: Limits) -> str:
        # Outside a user namespace of its own, the kernel would count everything that the user runs. The process that
        # starts a test counts as one.
        threads = limits.threads + 1 if self.isolated else 0
        cpu_seconds = math.ceil(2 * limits.cpu_seconds) + 1  # for when nobody watches: see supervise.py
        numbers = (cpu_seconds, limits.memory_bytes, limits.output_bytes, threads)
        return ",".join((*map(str, numbers), self._filter))

    def command(self) -> list[str]:
        """Bubblewrap's command line, to which "--" and a program's is appended."""
        return list(self._prefix)

    def _isolation(self, bwrap: str) -> list[str]:
        user = "0" if self._as_nobody else str(NOBODY)
        # No new session inside: what runs there stays in the process group that `Process.end` kills.
        command = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--uid", user, "--gid", user]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        if self._as_nobody:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += _system(Path(self._interpreter), self._all_of_usr)
        command += ["--ro-bind", str(INSIDE), "/inside", "--dir", "/packages"]
        for index, folder in enumerate(self._packages):
            command += ["--ro-bind", str(folder), f"/packages/{index}"]
        return [*command, "--dir", "/tmp", "--dir", "/input", "--remount-ro", "/", "--chdir", "/"]

    def _try(self) -> None:
        """Finds out how a sandbox starts here, the tightest way first."""
        self._as_nobody = False
        if not self.isolated:
            if refusal := self._trial():
                raise SandboxError(refusal)
            return
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"the sandbox needs bubblewrap (the program bwrap): {INSTALL}")
        refusals: list[str] = []
        for self._all_of_usr in (False, True):
            for self._as_nobody in (True, False) if os.geteuid() == 0 else (False,):
                self._prefix = self._isolation(bwrap)
                refusal = self._trial(() if self._all_of_usr else NEED_LIBRARIES)
                if refusal is None:
                    if self._all_of_usr:
                        warnings.warn(f"programs can read all of /usr: {refusals[0]}", RuntimeWarning, stacklevel=3)
                    return
                refusals.append(refusal)
        raise SandboxError(refusals[-1])

    def _trial(self, modules: Sequence[str] = ()) -> str | None:
        """Why a sandbox does not start or lacks what modules need, None where all is well."""
        pipe = subprocess.PIPE
        process = self.start("ready", modules, limits=Limits(), stdin=None, stdout=pipe, stderr=pipe)
        try:
            output, errors = process.communicate(timeout=TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxError(NO_START) from None
        finally:
            process.end()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if output == b"ready":
            return None
        return _refusal(errors.decode(errors="replace"), process.returncode)


class _Starting:
    """The conversation with bubblewrap until it starts what it is to run.

    Args:
        as_nobody: Whether to give the sandbox a user who is nobody outside. Bubblewrap itself can only give it the user
            of this process, so it waits until this process has done it.

    Attributes:
        options: For bubblewrap's command line.
        theirs: Descriptors for bubblewrap.
        left_open: The one that it does not close; -1 where it closes all.
    """

    def __init__(self, as_nobody: bool) -> None:
        self._as_nobody = as_nobody
        self._information, informs = os.pipe()
        self.theirs, self.left_open = [informs], -1
        self.options = ["--info-fd", str(informs)]
        if as_nobody:
            self.left_open, self._go = os.pipe()
            self.theirs.append(self.left_open)
            self.options += ["--userns-block-fd", str(self.left_open)]

    def __enter__(self) -> _Starting:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._information, *self.theirs, *([self._go] if self._as_nobody else [])):
            os.close(descriptor)

    def inside(self) -> int | None:
        """The first process inside, as this process numbers it, once it may go on; None where bubblewrap has failed.

        Raises:
            SandboxError: It does not say so in time.
        """
        while self.theirs:  # so that bubblewrap's end is seen
            os.close(self.theirs.pop())
        text, poll = b"", select.poll()
        poll.register(self._information, select.POLLIN)
        while b"}" not in text:
            if not poll.poll(TRIAL_SECONDS * 1000):
                raise SandboxError(NO_START)
            part = os.read(self._information, 4096)
            if not part:
                return None
            text += part
        pid = int(json.loads(text)["child-pid"])
        if self._as_nobody:
            for name in ("uid_map", "gid_map"):
                # Root as well, who mounts what nobody may not reach: who has given up the right to be it never is.
                with contextlib.suppress(OSError):  # an unknown user: bubblewrap will say so
                    Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            with contextlib.suppress(BrokenPipeError):  # it has been killed
                os.write(self._go, b"+")
        return pid


def _offer_to_the_killer(pid: int | None) -> None:
    """Has the kernel end a process, and those that it starts, before any other when memory runs out."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))


def _refusal(errors: str, status: int) -> str:
    lines = errors.strip().splitlines() or [f"exit status {status}"]
    if "Unknown option" in lines[0]:
        return f"the sandbox needs bubblewrap 0.7 or later ({lines[0]}): update it"
    if "ModuleNotFoundError" in lines[-1]:
        return f"the sandbox needs a complete Python ({lines[-1]}): {sys.base_prefix} lacks a standard module"
    return f"the sandbox does not start ({lines[-1]}): namespaces may be forbidden here; {ALLOW}"


def _system(interpreter: Path, all_of_usr: bool) -> list[str]:
    """Binds the interpreter, the system's libraries, the time zones and harmless devices; hides installed packages."""
    prefix = Path(sys.base_prefix).resolve()
    base = {"base": str(prefix), "platbase": str(prefix), "installed_base": str(prefix)}
    paths = {name: Path(sysconfig.get_path(name, vars=base)).resolve() for name in sysconfig.get_path_names()}
    folders = [interpreter, *map(Path, ("/usr/lib64", "/lib64", *zoneinfo.TZPATH))]
    if prefix in (Path("/"), Path("/usr")):
        folders += [paths["stdlib"], paths["platstdlib"]]
    else:
        folders += [prefix] if all_of_usr else [prefix / "lib", prefix / "lib64"]
    if architecture := sysconfig.get_config_var("MULTIARCH"):
        folders += [Path("/usr/lib", architecture), Path("/lib", architecture)]
    if all_of_usr:
        folders += [Path("/usr"), Path("/lib")]
    options = ["--dir", "/dev", "--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    shown = _outermost(path.resolve() for path in folders if path.exists())
    for path in shown:
        # Without the first, folders around it can be for their owner only.
        options += ["--dir", str(path.parent), "--ro-bind", str(path), str(path)]
    for path in {paths["purelib"], paths["platlib"], *paths["stdlib"].glob("*-packages")}:
        if path.is_dir() and any(path.is_relative_to(folder) for folder in shown):
            options += ["--perms", "0555", "--tmpfs", str(path)]
    for path in (Path("/lib"), Path("/lib64"), Path("/lib32"), Path("/libx32")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
    for device in ("null", "zero", "urandom"):
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*options, "--symlink", "/input/input", "/dev/stdin"]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Those that are in none of the others, each once."""
    found: list[Path] = []
    for path in sorted(set(paths)):  # a folder comes before what is in it
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found
