import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.troll_sandbox.processes import busy_machine, wait_until
from troll_sandbox import supervise
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.errors import StarvedError
from troll_sandbox.launch import Process
from troll_sandbox.limits import Limits
from troll_sandbox.supervise import Watch, wait_for

pytestmark = pytest.mark.needs_bubblewrap

#: The kernel adds up CPU time of others by ticks, at least 100 a second; a program sees its own to the nanosecond.
TICK = 0.01

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=20, idle_seconds=0.5)

BUSY = "while True: pass"
SLEEP = "import time\ntime.sleep(1000)"


@contextlib.contextmanager
def started(sandbox: Bubblewrap, program: str, limits: Limits = LIMITS) -> Iterator[Process]:
    """A sandbox that runs a program once, without input, and then ends."""
    theirs, ours = os.pipe()
    with os.fdopen(ours, "wb") as pipe:
        process = sandbox.start("stdio", ["/input"], limits=limits, stdin=theirs, stdout=None)
        os.close(theirs)
        data = program.encode()
        pipe.write(len(data).to_bytes(8, "little") + data + bytes(8))
    try:
        yield process
    finally:
        process.end()


def watched(process: Process, limits: Limits, *partners: Process) -> str | None:
    """The verdict on a sandbox, None if it ended by itself."""
    watch, verdict = Watch([process, *partners], limits), None
    descriptor = os.pidfd_open(process.pid)
    while verdict is None and not wait_for(descriptor, watch.period):
        verdict = watch.verdict()
    os.close(descriptor)
    process.end()
    return verdict


def verdict(sandbox: Bubblewrap, program: str, limits: Limits = LIMITS) -> str | None:
    with started(sandbox, program, limits) as process:
        return watched(process, limits)


def test_watch_measures_cpu_time_of_the_whole_sandbox(sandbox: Bubblewrap) -> None:
    limits = Limits(cpu_seconds=10, wall_seconds=20, idle_seconds=1)
    with started(sandbox, "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(100)", limits) as process:
        watch = Watch([process], limits)
        while (found := watch.verdict()) is None:
            time.sleep(watch.period)
        assert found == "idle"
        assert 0.3 - 2 * TICK <= watch.cpu_seconds < 0.6
    assert verdict(sandbox, BUSY) == "cpu"


def test_watch_period_is_random(sandbox: Bubblewrap) -> None:
    with started(sandbox, SLEEP) as process:
        watch = Watch([process], Limits())
        periods = [watch.period for _ in range(100)]
    assert len(set(periods)) > 90
    assert 0.1 < min(periods) < 0.15 < 0.2 < max(periods) <= 0.25


def test_watch_counts_uninterruptible_waiting_as_idle() -> None:
    source = "import ctypes, time\nctypes.CDLL(None).vfork()\ntime.sleep(1000)"  # the kernel suspends the parent
    process = Process([sys.executable, "-S", "-c", source], start_new_session=True)
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "D")
    assert watched(process, LIMITS) == "idle"


@pytest.mark.parametrize(("threads", "wanted"), [(10, "threads"), (21, "idle")])
def test_watch_counts_threads(sandbox: Bubblewrap, threads: int, wanted: str) -> None:
    program = "import threading, time\nthreading.stack_size(1 << 16)\n"
    program += "for _ in range(20): threading.Thread(target=time.sleep, args=(99,)).start()"
    with started(sandbox, program) as process:
        assert watched(process, replace(LIMITS, threads=threads)) == wanted


def test_watch_takes_waiting_for_a_busy_partner_as_busy(sandbox: Bubblewrap) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=100, idle_seconds=0.5)
    with started(sandbox, SLEEP, limits) as waiting, started(sandbox, BUSY, limits) as partner:
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(watched(waiting, limits, partner)))
        thread.start()
        assert watched(partner, limits) == "cpu"
        assert not found
        thread.join()
        assert found == ["idle"]


def test_watch_raises_on_a_machine_that_is_too_busy(sandbox: Bubblewrap) -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with busy_machine(6), pytest.raises(StarvedError, match="too busy"):
            verdict(sandbox, BUSY, Limits(cpu_seconds=10, wall_seconds=1))
    finally:
        os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize(
    ("share", "busy", "idle_seconds", "found", "seconds"),
    [
        (1.0, True, 5.0, "cpu", 5.25),
        (0.2, True, 5.0, "cpu", 26.25),  # waiting for a CPU does not count
        (0.05, True, 5.0, "starved", 60.0),
        (0.05, False, 5.0, "idle", 5.0),
        (0.2, False, 5.0, "wall", 20.0),
        (0.0, False, 99.0, "wall", 20.0),
    ],
)
def test_watch_does_not_count_waiting_for_a_cpu(monkeypatch, share, busy, idle_seconds, found, seconds):
    now = 0.0
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervise, "_cpu_seconds", lambda pids: share * now * len(pids))
    monkeypatch.setattr(supervise, "_tree", lambda *pids: list(pids))
    monkeypatch.setattr(supervise, "_busy", lambda pid: busy)
    monkeypatch.setattr(supervise, "_threads", lambda pid: ["1"])
    process = SimpleNamespace(pid=1, own_threads=1, most=None)
    watch = Watch([cast(Process, process)], Limits(cpu_seconds=5, wall_seconds=20, idle_seconds=idle_seconds))
    verdict: str | None = None
    while verdict is None:
        now += 0.125
        try:
            verdict = watch.verdict()
        except StarvedError:
            verdict = "starved"
    assert (verdict, now) == (found, pytest.approx(seconds, abs=0.3))
