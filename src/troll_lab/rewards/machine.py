"""The number of processes that this machine can run at a time.

Functions with an argument `root` read `proc` and `sys/fs/cgroup` below it: the root of the file system.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from troll_sandbox.control_groups import own_groups

#: Environment variables with the number of processes on this machine: torchrun's and accelerate's, then those of MPIs.
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def processes(memory_bytes: int) -> int:
    """The processes that may work for this one at a time.

    Args:
        memory_bytes: The memory that each of them may use.

    Returns:
        The CPU cores that this process may use, or fewer if its memory is too small for as many; at least 1. Cores and
        memory are divided among the processes that a launcher has started on this machine.
    """
    root = Path("/")
    most, memory = cores(root), memory_limit(root)
    if memory is not None:
        most = min(most, memory // memory_bytes)
    return max(1, most // local_ranks(os.environ))


def local_ranks(environment: Mapping[str, str]) -> int:
    """The number of this training's processes on this machine, from its launcher; 1 without a launcher."""
    for name in LOCAL_RANKS:
        with contextlib.suppress(ValueError):
            if (ranks := int(environment.get(name, ""))) >= 1:
                return ranks
    return 1


def cores(root: Path) -> int:
    """The CPU cores that this process may use: those it may run on, or fewer if its control group has a quota."""
    quotas = [tuple(text.split()) for text in _group_files(root, "", "cpu.max")]
    quotas += zip(
        _group_files(root, "cpu", "cpu.cfs_quota_us"), _group_files(root, "cpu", "cpu.cfs_period_us"), strict=False
    )
    # macOS does not say which cores a process may use.
    most = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for quota in quotas:
        with contextlib.suppress(ValueError):  # "max"
            microseconds, period = map(int, quota)
            most += [microseconds // period] if microseconds > 0 else []  # -1 means no quota
    return max(1, min(most))


def memory_limit(root: Path) -> int | None:
    """The bytes of memory that this process may use: the machine's, or less by its control group; None if unknown."""
    limits = [*_group_files(root, "", "memory.max"), *_group_files(root, "memory", "memory.limit_in_bytes")]
    found = [int(text) for text in limits if text != "max"]
    with contextlib.suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return min(found, default=None)


def _group_files(root: Path, controller: str, name: str) -> Iterator[str]:
    """The contents of a file of that name in each of the process's control groups, where there is one."""
    for folder in own_groups(controller, root):
        with contextlib.suppress(OSError):
            yield (folder / name).read_text().strip()
