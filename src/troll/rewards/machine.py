"""How many programs this machine can carry at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from troll.rewards.sandbox.limits import Limits

#: How many processes a launcher has started on this machine: torchrun's and accelerate's name, then those of MPIs.
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

#: A program may use `memory_bytes`, and its judge twice as much.
SHARES = 3


def default_workers(limits: Limits) -> int:
    """How many programs to run at a time.

    Args:
        limits: Of each program.

    Returns:
        As `processes` says, where every program and its judge use all of their memory.
    """
    return processes(SHARES * limits.memory_bytes + limits.disk_bytes)


def processes(memory_bytes: int) -> int:
    """How many processes may work for this one at a time.

    Args:
        memory_bytes: What each may use.

    Returns:
        The CPU cores that this process may use, but no more than its memory carries. Both are divided among the
        processes that a launcher has started on this machine. At least 1.
    """
    root = Path("/")
    most, memory = cores(root), memory_limit(root)
    if memory is not None:
        most = min(most, memory // memory_bytes)
    return max(1, most // local_ranks(os.environ))


def local_ranks(environment: Mapping[str, str]) -> int:
    """The processes of this training on this machine, as its launcher tells; 1 without one."""
    for name in LOCAL_RANKS:
        with contextlib.suppress(ValueError):
            if (ranks := int(environment.get(name, ""))) >= 1:
                return ranks
    return 1


def cores(root: Path) -> int:
    """The CPU cores that this process may use: those it may run on, or less by the quota of its control group.

    Args:
        root: Of the file system, with `proc` and `sys/fs/cgroup`.
    """
    quotas = [tuple(text.split()) for text in _group_files(root, "", "cpu.max")]
    quotas += zip(
        _group_files(root, "cpu", "cpu.cfs_quota_us"), _group_files(root, "cpu", "cpu.cfs_period_us"), strict=False
    )
    # macOS does not say which cores a process may use.
    most = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for quota in quotas:
        with contextlib.suppress(ValueError):  # "max"
            microseconds, period = map(int, quota)
            most += [microseconds // period] if microseconds > 0 else []  # -1 is none
    return max(1, min(most))


def memory_limit(root: Path) -> int | None:
    """The memory that this process may use, in bytes: the machine's, or less by its control group.

    Args:
        root: Of the file system, with `proc` and `sys/fs/cgroup`.

    Returns:
        The smallest of the limits; None if none can be read.
    """
    limits = [*_group_files(root, "", "memory.max"), *_group_files(root, "memory", "memory.limit_in_bytes")]
    found = [int(text) for text in limits if text != "max"]
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return min(found, default=None)


def _group_files(root: Path, controller: str, name: str) -> Iterator[str]:
    """The contents of a file of this process's control group and of those around it, the innermost first.

    Args:
        root: Of the file system.
        controller: Of version 1; empty for version 2.
        name: The file's.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            hierarchy = root / "sys/fs/cgroup" / controller
            folder = hierarchy / group.lstrip("/")  # a container may see its own as the root only
            for path in (folder, *folder.parents):
                with contextlib.suppress(OSError):
                    yield (path / name).read_text().strip()
                if path == hierarchy:
                    break
