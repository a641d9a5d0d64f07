"""Watches a sandbox from outside: tells when it computes, idles or lasts too long, or has too many threads or memory.

CPU time is read from the processes' clocks. The kernel's own limit on it counts ticks, which on a busy machine can be
tens of per cent more than what a process had: it is set higher, for when nobody watches.
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

#: Below this share of one CPU, a program that is not waiting for a CPU counts as idle.
IDLE_SHARE = 0.1

#: Below this share of one CPU, a program that could use more is kept from it by others.
STARVED_SHARE = 0.5

#: Wall budgets for which a program may last while others have the CPU that it wants.
PATIENCE = 3

#: What a sandbox may use to start up. A program that exits by itself is judged by its exact CPU time.
START_SECONDS = 0.25

#: Without it a sandbox cannot be looked into: only wall time catches a program that sleeps, and only the kernel's limit
#: on CPU time one whose functions are called.
LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


class Watch:
    """Tells when sandboxes have used too much CPU or memory, idled, run for too long, or started too many threads.

    Args:
        processes: As `Launcher.start` returned them; the first is the one that is watched. While one of the others
            works, it is not idle.
        limits: What it was started with. What it waits for a CPU is not part of its wall time.

    Attributes:
        cpu_seconds: CPU time since the start or the last restart, as last seen.
        beside_seconds: CPU time of the others since then, as last seen.
    """

    def __init__(self, processes: Sequence[Process], limits: Limits) -> None:
        self._watched, *self._beside = (process.pid for process in processes)
        self._limits, self._most_threads = limits, limits.threads + processes[0].own_threads
        self._most_bytes = processes[0].most
        self._period = min(0.25, limits.idle_seconds / 4, limits.wall_seconds / 4)
        self._random = random.Random()
        self._starved = 0.0
        self._started = time.monotonic()
        self.restart()

    @property
    def period(self) -> float:
        """Seconds until the next call of `verdict`: random, so that no program can be busy at just these moments."""
        return self._period * self._random.uniform(0.5, 1.0)

    @property
    def seconds(self) -> float:
        """Wall time since the start, as far as it counts: without what it waited for a CPU."""
        return time.monotonic() - self._started - self._starved

    def restart(self) -> None:
        """Starts counting anew, for the next test in the same sandbox; wall time goes on."""
        self._before, self._before_beside = _cpu_seconds(_tree(self._watched)), self._cpu_beside()
        self._seen = self.cpu_seconds = self.beside_seconds = 0.0
        self._active = self._looked = time.monotonic()

    def verdict(self) -> Literal["cpu", "idle", "wall", "threads", "memory"] | None:
        """Which of the limits has been passed, if any.

        Raises:
            StarvedError: It has lasted for `PATIENCE` wall budgets, and for most of the time others had the CPU.
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
        """Reads the CPU time; what a process used that has been reaped since the last time is missing."""
        self.cpu_seconds = max(self.cpu_seconds, _cpu_seconds(_tree(self._watched)) - self._before)
        self.beside_seconds = max(self.beside_seconds, self._cpu_beside() - self._before_beside)

    def _cpu_beside(self) -> float:
        return sum(_cpu_seconds(_tree(pid)) for pid in self._beside)

    def _works(self, now: float) -> bool:
        """Whether it has used a CPU since the last time, or could; what it could not use is counted."""
        tree = [pid for root in (self._watched, *self._beside) for pid in _tree(root)]
        seen, self._seen = self._seen, _cpu_seconds(tree)
        looked, self._looked = self._looked, now
        share = abs(self._seen - seen) / max(now - looked, 1e-9)
        if share >= STARVED_SHARE:
            return True
        busy = any(map(_busy, tree))
        self._starved += (now - looked) * busy
        return busy or share >= IDLE_SHARE


def wait_for(descriptor: int, seconds: float, events: int = select.POLLIN) -> bool:
    """Whether a file descriptor becomes ready in time; `select.poll`, because descriptors may be above 1024."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(seconds * 1000))


def _tree(root: int) -> list[int]:
    """A process and all below it, as this process numbers them."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for thread in _threads(pid):  # gVisor starts processes in any
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                waiting += map(int, children.read().split())
    return found


def _cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes by their own clocks: exact, and with no need of permissions."""
    seconds = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names
    return seconds


def _threads(pid: int) -> list[str]:
    """Threads of a process, none of one that has ended."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def _resident(pid: int) -> int:
    """Bytes of memory that a process has touched; control groups, where there are any, are faster and count more."""
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
