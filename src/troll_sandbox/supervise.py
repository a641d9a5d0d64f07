"""Watches a sandbox from outside: its CPU time, idle time, wall time, threads and memory.

CPU time is read from the clocks of the processes. The kernel's own limit counts ticks, which on a busy machine can be
tens of per cent too many, so it is set higher and serves as a backstop.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from troll_sandbox.errors import StarvedError
from troll_sandbox.launch import Process
from troll_sandbox.limits import Limits

#: A program that uses less than this share of one CPU, and is not waiting for a CPU, is idle.
IDLE_SHARE = 0.1

#: A program that uses less than this share of one CPU, although it could use more, is held up by other processes.
STARVED_SHARE = 0.5

#: A program that gets too little CPU time may last for this many wall budgets.
PATIENCE = 3

#: CPU time for starting a sandbox. A program that exits by itself is judged by its exact CPU time.
START_SECONDS = 0.25

#: Some kernels do not list children. A sandbox cannot be looked into then: only the limit on wall time ends a program
#: that sleeps, and only the kernel's limit on CPU time ends a function that loops.
LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


class Watch:
    """Watches a sandbox for a limit that it exceeds.

    Args:
        processes: The sandbox, and those that it waits for, such as its judge: while they work, it is not idle.
        limits: The limits of the sandbox.

    Attributes:
        before: CPU time of the sandbox until the start or the last restart.
        cpu_seconds: CPU time of the sandbox since then, when last measured.
        others_seconds: CPU time of the others since then.
    """

    def __init__(self, processes: Sequence[Process], limits: Limits) -> None:
        self._watched, *self._others = (process.pid for process in processes)
        self._limits, self._most_threads = limits, limits.threads + processes[0].own_threads
        self._most_bytes = processes[0].most
        self._period = min(0.25, limits.idle_seconds / 4, limits.wall_seconds / 4)
        self._random = random.Random()
        self._starved = 0.0
        self._started = time.monotonic()
        self.restart()

    @property
    def period(self) -> float:
        """Seconds until the next call of `verdict`; random, so that no program can be busy at just these moments."""
        return self._period * self._random.uniform(0.5, 1.0)

    @property
    def seconds(self) -> float:
        """Wall time since the start, without the time it waited for a CPU."""
        return time.monotonic() - self._started - self._starved

    def restart(self) -> None:
        """Starts the count for the next test in the same sandbox; wall time goes on."""
        self.before, self._others_before = _cpu_seconds(_tree(self._watched)), _cpu_seconds(_tree(*self._others))
        self._seen = self.cpu_seconds = self.others_seconds = 0.0
        self._active = self._looked = time.monotonic()

    def verdict(self) -> Literal["cpu", "idle", "wall", "threads", "memory"] | None:
        """The limit that is exceeded, if any.

        Raises:
            StarvedError: It has run for `PATIENCE` times its wall limit, while others used the CPU for most of the
                time.
        """
        now = time.monotonic()
        if self.seconds > self._limits.wall_seconds:
            return "wall"
        if now - self._started > PATIENCE * self._limits.wall_seconds:
            raise StarvedError("the machine is too busy: programs wait for a CPU most of the time; use fewer workers")
        if not LISTS_CHILDREN:
            return None
        self.measure()
        if self.cpu_seconds > self._limits.cpu_seconds + START_SECONDS:
            return "cpu"
        if any(len(_threads(pid)) > self._most_threads for pid in _tree(self._watched)):
            return "threads"
        if self._most_bytes is not None and max(map(_resident, _tree(self._watched))) > self._most_bytes:
            return "memory"
        if self._works(now):
            self._active = now
        return "idle" if now - self._active > self._limits.idle_seconds else None

    def measure(self) -> None:
        """Reads the CPU time, without that of processes that were reaped since the last reading."""
        self.cpu_seconds = max(self.cpu_seconds, _cpu_seconds(_tree(self._watched)) - self.before)
        self.others_seconds = max(self.others_seconds, _cpu_seconds(_tree(*self._others)) - self._others_before)

    def _works(self, now: float) -> bool:
        """Whether it has used a CPU since the last time, or waits for one; the time that it waited is added up."""
        tree = _tree(self._watched, *self._others)
        seen, self._seen = self._seen, _cpu_seconds(tree)
        looked, self._looked = self._looked, now
        share = abs(self._seen - seen) / max(now - looked, 1e-9)
        if share >= STARVED_SHARE:
            return True
        busy = any(map(_busy, tree))
        self._starved += (now - looked) * busy
        return busy or share >= IDLE_SHARE


def wait_for(descriptor: int, seconds: float, events: int = select.POLLIN) -> bool:
    """Whether a file descriptor becomes ready in time. Uses `poll`, since `select` takes descriptors up to 1023."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(seconds * 1000))


def _tree(*roots: int) -> list[int]:
    """Processes and all their descendants, by their numbers outside."""
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for thread in _threads(pid):  # gVisor starts processes from any of its threads
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                waiting += map(int, children.read().split())
    return found


def _cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of processes by their own clocks, which are exact and need no permission."""
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names
    return seconds


def _threads(pid: int) -> list[str]:
    """The threads of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def _resident(pid: int) -> int:
    """Bytes of memory that a process has touched. A control group is faster and counts more, but may be missing."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _busy(pid: int) -> bool:
    """Whether a thread of a process runs or waits for a CPU."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
