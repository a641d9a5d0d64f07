"""A control group for each sandbox, if this user may make them: a bound on all memory of a sandbox.

Limits on a process bound only its address space. Page tables, pipes, folders in memory and buffers of the kernel come
on top of that.
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

#: Seconds to wait until killed processes are gone.
REMOVAL_SECONDS = 1.0

#: Memory that a group may still hold when it is used again: cached pages of files that programs have read.
KEPT_BYTES = 16 * MEBIBYTE

_PREFIX = "troll-"
_numbers = itertools.count()


class MemoryGroup:
    """A control group. If it cannot be made, the methods do nothing, and a sandbox has only the other limits.

    Args:
        folder: The folder to make it in; see `groups_folder`.
        most: Bytes that all its processes may use together.

    Attributes:
        path: The group's folder.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.most, self._kills = most, 0
        while True:
            self.path = folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
            try:
                self.path.mkdir()
            except FileExistsError:  # another container's, or left by a killed process
                continue
            except OSError:  # no group can be made here
                pass
            break
        bounds = {"memory.limit_in_bytes": most, "memory.max": most, "memory.swap.max": 0}
        for name, bound in bounds.items():  # of version 1, or of version 2
            self._write(name, bound)

    def add(self, pid: int) -> bool:
        """Moves a process, and those that it starts from now on, into the group; returns whether that worked."""
        self._kills = self._all_kills()
        return self._write("cgroup.procs", pid)

    def is_exceeded(self) -> bool:
        """Whether the kernel has killed a process because of the bound since the last one was added."""
        return self._all_kills() > self._kills

    def is_emptied(self) -> bool:
        """Whether its processes and their memory are gone, so that another sandbox can use it."""
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
            with open(self.path / name, "r+b", buffering=0) as file:  # this mode does not create a file
                file.write(str(value).encode())
        except OSError:
            return False
        return True


class MemoryGroups:
    """Control groups, each used by one sandbox after another, since making or removing one slows down all others.

    They are removed when this object is garbage-collected, or when the process ends.

    Args:
        folder: The folder to make them in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._returned: dict[Path, MemoryGroup] = {}
        at_end(self, remove, self._returned)

    def take(self, most: int) -> MemoryGroup:
        """A group without processes that bounds memory to `most` bytes."""
        with self._lock:
            for path, group in list(self._returned.items()):
                is_emptied = group.most == most and group.is_emptied()
                if is_emptied or _removed(path):
                    del self._returned[path]
                if is_emptied:
                    return group
        return MemoryGroup(self._folder, most)

    def give_back(self, group: MemoryGroup) -> None:
        """Keeps a group, whose processes have been killed, for another sandbox."""
        with self._lock:
            self._returned[group.path] = group


def remove(groups: Collection[Path], seconds: float = REMOVAL_SECONDS) -> None:
    """Removes groups whose processes have been killed; waits up to some seconds until these are gone."""
    end = time.monotonic() + seconds
    # Looks at all of them each time: when the process ends, its threads may still give groups back.
    while [path for path in list(groups) if not _removed(path)] and time.monotonic() < end:
        time.sleep(0.002)


def _removed(group: Path) -> bool:
    """Removes a group; returns whether it is gone. It stays as long as it has processes."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def groups_folder(root: Path = Path("/")) -> Path | None:
    """The folder in which this process may make groups with a bound on memory; None if a trial fails.

    With version 1 that is its own group. With version 2 it is the group around it, because there a group with processes
    has no subgroups. Groups that a killed parent has left are removed, and their processes are killed: bubblewrap waits
    for ever if its parent is killed while it starts.
    """
    with contextlib.suppress(OSError):
        folder = _own_or_outer(root)
        if folder is None:
            return None
        groups = folder.glob(f"{_PREFIX}*-*")
        left = [path for path in groups if not (root / "proc" / path.name.split("-")[1]).exists()]
        for path in left:
            with contextlib.suppress(OSError):
                for pid in map(int, (path / "cgroup.procs").read_text().split()):
                    if pid > 0:  # a process of another container has the number 0 here
                        os.kill(pid, signal.SIGKILL)
        remove(left)
        return folder if _works(folder) else None
    return None


def own_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's group and of those around it, the innermost first; empty if there is none.

    A container may see its own group only as the root, the last one.

    Args:
        controller: The controller of a hierarchy of version 1; empty for version 2.
        root: The root of the file system.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controller in controllers.split(","):
                hierarchy = root / "sys/fs/cgroup" / controller
                folder = hierarchy / group.lstrip("/")
                return [path for path in (folder, *folder.parents) if path.is_relative_to(hierarchy)]
    return []


def _own_or_outer(root: Path) -> Path | None:
    """This process's group of version 1, or the one around it of version 2; None where there is neither."""
    if first := own_groups("memory", root):
        return first[0]
    second = own_groups("", root)
    return next(iter(second[1:] or second), None)  # the root has none around it


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
