"""A control group for each sandbox, where this user may make some: a bound on all the memory that it costs.

Limits on a process bound its address space. Page tables, pipes, folders in memory and what a program has the kernel
keep come on top of that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from pathlib import Path

from troll_sandbox.lifetime import at_end
from troll_sandbox.limits import MEBIBYTE

#: How long processes that were killed may take to be gone.
END_SECONDS = 1.0

#: What a group may still hold when it is used again: pages of files that programs have read.
KEPT_BYTES = 16 * MEBIBYTE

_PREFIX = "troll-"
_numbers = itertools.count()


class MemoryGroup:
    """A control group; without one, where it cannot be made, a sandbox has the other limits only.

    Args:
        folder: In which groups can be made; see `groups_folder`.
        most: Bytes that all in it may use.

    Attributes:
        path: The folder that is the group.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.path, self.most, self._kills = _new_folder(folder), most, 0
        bounds = {"memory.limit_in_bytes": most, "memory.max": most, "memory.swap.max": 0}
        for name, bound in bounds.items():  # of version 1, or of version 2
            self._write(name, bound)

    def add(self, pid: int) -> bool:
        """Whether a process, and what it starts from now on, could be moved there."""
        self._kills = self._all_kills()
        return self._write("cgroup.procs", pid)

    def is_exceeded(self) -> bool:
        """Whether the kernel has ended a process for it, since the last one was added."""
        return self._all_kills() > self._kills

    def is_emptied(self) -> bool:
        """Whether its processes are gone, and their memory: then another sandbox can have it."""
        if self._read("cgroup.procs"):
            return False
        used = self._read("memory.usage_in_bytes") or self._read("memory.current")
        return bool(used) and int(used) <= KEPT_BYTES

    def _all_kills(self) -> int:
        lines = (self._read("memory.oom_control") or self._read("memory.events")).splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError:
            return ""

    def _write(self, name: str, value: int) -> bool:
        try:
            with open(self.path / name, "r+b", buffering=0) as file:  # which makes no file where there is none
                file.write(str(value).encode())
        except OSError:
            return False
        return True


class MemoryGroups:
    """Groups in one folder, each for one sandbox after another: to make and to remove one slows down all others.

    They are removed when this object is no longer used, or when the process ends.

    Args:
        folder: In which groups can be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._returned: dict[Path, MemoryGroup] = {}
        at_end(self, remove, self._returned)

    def take(self, most: int) -> MemoryGroup:
        """A group without processes, in which `most` bytes may be used."""
        with self._lock:
            for path, group in list(self._returned.items()):
                is_emptied = group.most == most and group.is_emptied()
                if is_emptied or _removed(path):
                    del self._returned[path]
                if is_emptied:
                    return group
        return MemoryGroup(self._folder, most)

    def give_back(self, group: MemoryGroup) -> None:
        """Takes a group whose processes have been killed."""
        with self._lock:
            self._returned[group.path] = group


def remove(groups: Collection[Path], seconds: float = END_SECONDS) -> None:
    """Removes groups whose processes have been killed; waits for those that are not gone yet, up to some seconds."""
    end = time.monotonic() + seconds
    # All of them each time: when the process ends, its threads may still give groups back.
    while [path for path in list(groups) if not _removed(path)] and time.monotonic() < end:
        time.sleep(0.002)


def _new_folder(folder: Path) -> Path:
    """The folder of a new group, which nobody else uses; it is not there if it cannot be made."""
    while True:
        path = folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir()
        except FileExistsError:  # of another container, or left by a process that was killed
            continue
        except OSError:
            pass
        return path


def _removed(group: Path) -> bool:
    """Whether a group is gone, which takes that its processes are."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def groups_folder(root: Path = Path("/")) -> Path | None:
    """Where this process may make groups with a bound on memory, None where it may not; found out by a trial.

    With version 1 that is its own group, with version 2 the one around it: there a group with processes has no others.
    Groups that processes have left which were killed are removed, with what is in them: bubblewrap waits for ever where
    its parent is killed while it starts.
    """
    with contextlib.suppress(OSError):
        folder = _own_or_outer(root)
        if folder is None:
            return None
        left = [
            path
            for path in folder.glob(f"{_PREFIX}*-*")
            if not (root / "proc" / path.name.removeprefix(_PREFIX).split("-")[0]).exists()
        ]
        for path in left:
            _end(path)
        remove(left)
        return folder if _works(folder) else None
    return None


def _own_or_outer(root: Path) -> Path | None:
    """This process's group of version 1, or the one around it of version 2; None where there is neither."""
    lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    for controller in ("memory", ""):
        for _, controllers, group in lines:
            if controller in controllers.split(","):
                hierarchy = root / "sys/fs/cgroup" / controller
                folder = hierarchy / group.lstrip("/")
                # Of the root's there is none around it.
                return folder if controller or folder == hierarchy else folder.parent
    return None


def _end(group: Path) -> None:
    """Kills the processes of a group; one of another container's has the number 0 here."""
    with contextlib.suppress(OSError):
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)


def _works(folder: Path) -> bool:
    group = MemoryGroup(folder, 1 << 30)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            bounded = any((group.path / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
            return bounded and group.add(process.pid)
        finally:
            process.kill()
            process.wait()
            remove([group.path])
