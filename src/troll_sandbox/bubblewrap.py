"""The sandbox: one fresh set of Linux namespaces per program, made by bubblewrap."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from troll_sandbox.errors import SandboxError
from troll_sandbox.launch import (
    ENVIRONMENT,
    INSIDE,
    INTERPRETER_FLAGS,
    NO_START,
    TRIAL_SECONDS,
    Launcher,
    Process,
)
from troll_sandbox.lifetime import temporary_folder
from troll_sandbox.limits import Limits
from troll_sandbox.system import NEED_LIBRARIES, System, system

#: Outside, the user that programs are where this process is root: the kernel does not count the threads of root.
NOBODY = 65534

INSTALL = "install it (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap)"
ALLOW = "see docs/sandbox.md for what to allow, on Ubuntu and in containers above all"


class Bubblewrap(Launcher):
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
            limits and system call filter. They can then read and change anything that the user can.

    Raises:
        SandboxError: bubblewrap is missing or too old, namespaces are forbidden, or this is not Linux on x86_64 or
            aarch64. Found out by one real run.
    """

    def __init__(self, *, packages: Sequence[Path] = (), run_without_isolation: bool = False) -> None:
        super().__init__(packages)
        self.isolated = not run_without_isolation
        if run_without_isolation:
            warnings.warn(
                "run_without_isolation=True: programs written by a model now run as your user, without a sandbox; "
                "they can read, change and delete your files and use the network",
                RuntimeWarning,
                stacklevel=2,
            )
            self._folder = temporary_folder(self, "troll-programs-")
        self._try()

    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: tuple[int, ...]) -> Process:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # bubblewrap inherits it, and would wait for ever
            raise SandboxError("the sandbox cannot run while SIGCHLD is ignored: set it to SIG_DFL")
        command = [str(self.interpreter), *INTERPRETER_FLAGS]
        environment = dict(ENVIRONMENT)
        folder = None
        if self.isolated:
            scripts, packages = "/inside", [f"/packages/{index}" for index in range(len(self.packages))]
        else:
            folder = environment["HOME"] = environment["TMPDIR"] = tempfile.mkdtemp(dir=self._folder)
            scripts, packages = str(INSIDE), [str(path) for path in self.packages]
        environment["PYTHONPATH"] = os.pathsep.join(packages)
        disk = limits.disk_bytes if self.isolated else 0
        # Outside a user namespace of its own, the kernel would count everything that the user runs. The process that
        # starts a test counts as one. The limit on CPU time is for when nobody watches: see supervise.py.
        threads, cpu_seconds = limits.threads + 1 if self.isolated else 0, math.ceil(2 * limits.cpu_seconds) + 1
        settings = self._settings(limits, cpu_seconds=cpu_seconds, threads=threads)
        with contextlib.ExitStack() as stack:
            starting = stack.enter_context(_Starting(self._as_nobody)) if self.isolated else None
            left = starting.left_open if starting else -1
            command += [f"{scripts}/enter.py", script, str(disk), str(left), settings, *arguments]
            if starting is not None:
                command = [*self.command(), *starting.options, "--", *command]
            try:
                process = Process(
                    command,
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    pass_fds=starting.theirs if starting else (),
                    cwd=folder or "/",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"cannot start {command[0]}: {error.strerror}") from error
            process.folder = folder
            try:
                self._bound(process, starting.inside() if starting else process.pid, script, limits)
            except BaseException:
                process.end()
                raise
        return process

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
        command += _binds(system(self.interpreter, self._all_of_usr))
        command += ["--ro-bind", str(INSIDE), "/inside", "--dir", "/packages"]
        for index, folder in enumerate(self.packages):
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

    def _refusal(self, errors: list[str]) -> str:
        if "Unknown option" in errors[0]:
            return f"the sandbox needs bubblewrap 0.7 or later ({errors[0]}): update it"
        if "ModuleNotFoundError" in errors[-1]:
            return f"the sandbox needs a complete Python ({errors[-1]}): {sys.base_prefix} lacks a standard module"
        return f"the sandbox does not start ({errors[-1]}): namespaces may be forbidden here; {ALLOW}"


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


def _binds(seen: System) -> list[str]:
    """What programs see of the system, and harmless devices."""
    options = ["--dir", "/dev"]
    for path in seen.shown:
        # Without the first, folders around it can be for their owner only.
        options += ["--dir", str(path.parent), "--ro-bind", str(path), str(path)]
    for path in seen.hidden:
        options += ["--perms", "0555", "--tmpfs", str(path)]
    for path, target in seen.links.items():
        options += ["--symlink", target, str(path)]
    for device in ("null", "zero", "urandom"):
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*options, "--symlink", "/input/input", "/dev/stdin"]
