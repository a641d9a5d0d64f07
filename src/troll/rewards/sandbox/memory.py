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
import time
from pathlib import Path

#: How long processes that were killed may take to be gone.
END_SECONDS = 1.0

_PREFIX = "troll-"
_numbers = itertools.count()
_left: set[Path] = set()


class MemoryGroup:
    """A control group; without one, where it cannot be made, a sandbox has the other limits only.

    Args:
        folder: In which groups can be made; see `groups_folder`.
        most: Bytes that all in it may use.

    Attributes:
        path: Its own folder.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.path = folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        with contextlib.suppress(OSError):
            self.path.mkdir()
            bounds = {"memory.limit_in_bytes": most, "memory.max": most, "memory.swap.max": 0}
            for name in filter(lambda name: (self.path / name).exists(), bounds):  # of version 1, or of version 2
                (self.path / name).write_text(str(bounds[name]))

    def add(self, pid: int) -> bool:
        """Whether a process, and what it starts from now on, could be moved there."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        return True

    def is_exceeded(self) -> bool:
        """Whether the kernel has ended a process for it."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                lines = (self.path / name).read_text().splitlines()
                return any(int(line.split()[1]) > 0 for line in lines if line.startswith("oom_kill "))
        return False

    def remove(self) -> None:
        """Removes it once its processes are gone, which have been killed."""
        _remove(self.path)


def groups_folder(root: Path = Path("/")) -> Path | None:
    """Where this process may make groups with a bound on memory, None where it may not; found out by a trial.

    With version 1 that is its own group, with version 2 the one around it: there a group with processes has no others.
    Groups that processes have left which were killed are removed, with what is in them: bubblewrap waits for ever where
    its parent is killed while it starts.
    """
    with contextlib.suppress(OSError):
        groups = dict(line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines())
        if "memory" in groups:
            folder = root / "sys/fs/cgroup/memory" / groups["memory"].lstrip("/")
        elif "" in groups:
            own = root / "sys/fs/cgroup" / groups[""].lstrip("/")
            folder = own if groups[""] == "/" else own.parent
        else:
            return None
        for left in folder.glob(f"{_PREFIX}*-*"):
            if not (root / "proc" / left.name.removeprefix(_PREFIX).split("-")[0]).exists():
                _end(left)
                _remove(left)
        return folder if _works(folder) else None
    return None


def _end(group: Path) -> None:
    """Kills the processes of a group; one of another container's has the number 0 here."""
    with contextlib.suppress(OSError):
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)


def _remove(group: Path) -> None:
    end = time.monotonic() + END_SECONDS
    _left.add(group)
    while group in _left and time.monotonic() < end:
        for path in list(_left):  # also those whose processes had not ended in time
            with contextlib.suppress(OSError):
                if path.exists():
                    path.rmdir()
                _left.discard(path)
        time.sleep(0.002 * (group in _left))


def _works(folder: Path) -> bool:
    group = MemoryGroup(folder, 1 << 30)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            bounded = any((group.path / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
            return bounded and group.add(process.pid)
        finally:
            process.kill()
            process.wait()
            group.remove()
