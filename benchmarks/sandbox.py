"""The sandbox on the CPU: programs per second, the parts of a start, and latencies next to programs that attack."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import measure
from tests.troll_sandbox.hostile import HOSTILE, ON_THE_MACHINE, ON_THE_USER
from troll_lab.rewards.tests import parse_tests
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.errors import SandboxError
from troll_sandbox.executor import Executor, Job
from troll_sandbox.gvisor import GVisor
from troll_sandbox.launch import INTERPRETER_FLAGS, Launcher
from troll_sandbox.limits import Limits
from troll_sandbox.local import LocalSandbox
from troll_sandbox.stream_runs import run_stdio

PROGRAMS = 512
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
STARTS = 100

#: The number of right programs next to each kind of attack, and of kinds that the table shows.
NEIGHBOURS, SHOWN = 20, 12

#: Runs one program on a number of tests.
Runner = Callable[[int], None]


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints tables of throughput, of the parts of a start, and of latency next to attacks."""
    try:
        sandbox = Bubblewrap()
    except SandboxError as error:
        raise measure.Skipped(str(error)) from error
    workers = len(os.sched_getaffinity(0))
    local = LocalSandbox(sandbox, sandbox)
    executor = Executor(lambda: (local, local.close), Limits(), workers)
    contenders: dict[str, Runner] = {
        "python -c": _plain,
        "sandbox, input and output": lambda tests: _sandboxed(sandbox, tests),
        "sandbox, function calls": lambda tests: _called(executor, tests),
    }
    rows: list[dict[str, Any]] = []
    for tests in (1, 5):
        rows += _throughput(contenders, tests, workers, repeats)
    rows += _starts(sandbox, repeats) + _neighbours(sandbox, workers)
    executor.close()
    return rows


def _plain(tests: int) -> None:
    for number in range(tests):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, input=f"{number} 1", capture_output=True, text=True, check=True)
        if done.stdout != f"{number + 1}\n":
            raise RuntimeError(f"python -c printed {done.stdout!r}")


def _sandboxed(sandbox: Launcher, tests: int) -> None:
    inputs, outputs = zip(*((f"{number} 1", f"{number + 1}") for number in range(tests)), strict=True)
    outcomes = run_stdio(sandbox, PROGRAM, inputs, outputs, Limits())
    if not all(outcome.passed for outcome in outcomes):
        raise RuntimeError(f"in the sandbox: {outcomes}")


def _called(executor: Executor, tests: int) -> None:
    asserts = [f"assert add({number}, 1) == {number + 1}" for number in range(tests)]
    [outcomes] = executor.run([Job(FUNCTION, parse_tests(json.dumps({"asserts": asserts})), False)])
    if isinstance(outcomes, SandboxError):
        raise outcomes
    if not all(outcome.passed for outcome in outcomes):
        raise RuntimeError(f"in the sandbox, by function calls: {outcomes}")


def _throughput(contenders: dict[str, Runner], tests: int, workers: int, repeats: int) -> list[dict[str, Any]]:
    walls: dict[str, list[float]] = {name: [] for name in contenders}
    latencies: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in track(range(repeats), description="measuring", transient=True):
        for name, runner in contenders.items():
            start = time.perf_counter()
            with ThreadPoolExecutor(workers) as pool:
                latencies[name] += pool.map(measure.elapsed, [functools.partial(runner, tests)] * PROGRAMS)
            walls[name].append(time.perf_counter() - start)

    table = measure.numbers("contender", f"{PROGRAMS} programs", "ratio (min–max)", "programs/s", "p50", "p95")
    rows = []
    baseline, *_ = walls.values()
    for name, taken in walls.items():
        ratios = [wall / base for wall, base in zip(taken, baseline, strict=True)]
        median, (p50, p95) = statistics.median(taken), _percentiles(latencies[name])
        speed = PROGRAMS / median
        table.add_row(
            name,
            measure.duration(median),
            measure.ratio_text(ratios),
            f"{speed:.0f}",
            measure.duration(p50),
            measure.duration(p95),
        )
        row = {"contender": name, "tests": tests, "workers": workers, "seconds": taken, "programs_per_second": speed}
        rows.append(row | {"ratio": statistics.median(ratios), "p50": p50, "p95": p95})
    Console(width=110).print(f"{tests} test{'s' * (tests > 1)} per program, {workers} workers", table)
    return rows


def _percentiles(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=20)
    return cuts[9], cuts[18]


def _starts(sandbox: Bubblewrap, repeats: int) -> list[dict[str, Any]]:
    python = [os.path.realpath(sys._base_executable), *INTERPRETER_FLAGS]  # type: ignore[attr-defined]
    bwrap = [*sandbox.command(), "--"]
    steps: dict[str, Callable[[], object]] = {
        "a process": lambda: subprocess.run(["/bin/true"], check=True),
        "the interpreter": lambda: subprocess.run([*python, "-c", "pass"], check=True),
        "bubblewrap, python -V": lambda: subprocess.run([*bwrap, python[0], "-V"], check=True, capture_output=True),
        "bubblewrap, interpreter": lambda: subprocess.run([*bwrap, *python, "-c", "pass"], check=True),
        "… limits and filter": lambda: _ready(sandbox),
        "… program and 1 test": lambda: _sandboxed(sandbox, 1),
        "… program and 5 tests": lambda: _sandboxed(sandbox, 5),
    }
    with contextlib.suppress(SandboxError):
        gvisor = GVisor()
        steps["gVisor, program and 1 test"] = lambda: _sandboxed(gvisor, 1)
        steps["gVisor, program and 5 tests"] = lambda: _sandboxed(gvisor, 5)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(STARTS * repeats // 5 or 1), description="measuring", transient=True):
        for name, step in steps.items():
            taken[name].append(measure.elapsed(step))
    return measure.show("what a start consists of, one at a time", taken)


def _ready(sandbox: Bubblewrap) -> None:
    limits = Limits()
    process = sandbox.start("ready", limits=limits, stdin=None, stdout=None)
    if process.wait() != 0:
        raise RuntimeError("the sandbox did not start")


def _neighbours(sandbox: Bubblewrap, workers: int) -> list[dict[str, Any]]:
    """Latency of right programs, one at a time, while the other workers run one kind of attack again and again."""
    names = [*ON_THE_MACHINE, *(name for name in ON_THE_USER if "$" not in HOSTILE[name])]
    _latencies(sandbox, NEIGHBOURS)
    rows: list[dict[str, Any]] = []
    for name in track(names[:3] if measure.small else names, description="measuring", transient=True):
        quiet, stop = _latencies(sandbox, NEIGHBOURS), threading.Event()
        with ThreadPoolExecutor(max(1, workers - 1)) as pool:
            for _ in range(max(1, workers - 1)):
                pool.submit(_attack, sandbox, HOSTILE[name], stop)
            time.sleep(0.2)  # until it has begun
            attacked = _latencies(sandbox, NEIGHBOURS)
            stop.set()
        p50 = statistics.median(quiet), statistics.median(attacked)
        rows.append({"attack": name, "quiet": p50[0], "attacked": p50[1], "ratio": p50[1] / p50[0]})

    rows.sort(key=lambda row: -row["ratio"])
    table = measure.numbers("next to", "p50 by itself", "p50", "ratio")
    for row in rows[:SHOWN]:
        times = (measure.duration(row[key]) for key in ("quiet", "attacked"))
        table.add_row(row["attack"], *times, f"{row['ratio']:.2f}")
    middle = statistics.median(row["ratio"] for row in rows)
    title = f"Right programs next to {len(rows)} kinds of attacks: the {SHOWN} slowest; median ratio {middle:.2f}"
    Console(width=110).print(title, table)
    return rows


def _latencies(sandbox: Bubblewrap, count: int) -> list[float]:
    """The seconds of each of `count` right programs; raises if one fails."""
    return [measure.elapsed(lambda: _sandboxed(sandbox, 1)) for _ in range(count)]


def _attack(sandbox: Bubblewrap, program: str, stop: threading.Event) -> None:
    while not stop.is_set():
        if run_stdio(sandbox, program, [""], ["breach"], Limits(cpu_seconds=2, idle_seconds=2))[0].passed:
            raise RuntimeError(f"an attack got through: {program}")
