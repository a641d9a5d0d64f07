"""Programs per second in the sandbox, against plain subprocesses, and what a start consists of; all on the CPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import measure
from troll.rewards.program import parse_tests
from troll.rewards.sandbox.bubblewrap import INTERPRETER_FLAGS, Sandbox
from troll.rewards.sandbox.limits import Limits
from troll.rewards.sandbox.pool import Pool
from troll.rewards.sandbox.stdio import run_stdio

PROGRAMS = 512
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
STARTS = 100

#: Runs one program on a number of tests.
Runner = Callable[[int], None]


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """A table of throughput, and one of what a start consists of."""
    sandbox = Sandbox()
    workers = len(os.sched_getaffinity(0))
    pool = Pool(sandbox, Limits(), workers)
    contenders: dict[str, Runner] = {
        "python -c": _plain,
        "sandbox, input and output": lambda tests: _sandboxed(sandbox, tests),
        "sandbox, function calls": lambda tests: _called(pool, tests),
    }
    rows: list[dict[str, Any]] = []
    for tests in (1, 5):
        rows += _throughput(contenders, tests, workers, repeats)
    pool.close()
    return rows + _starts(sandbox, repeats)


def _plain(tests: int) -> None:
    for number in range(tests):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, input=f"{number} 1", capture_output=True, text=True, check=True)
        if done.stdout != f"{number + 1}\n":
            raise RuntimeError(f"python -c printed {done.stdout!r}")


def _sandboxed(sandbox: Sandbox, tests: int) -> None:
    inputs, outputs = zip(*((f"{number} 1", f"{number + 1}") for number in range(tests)), strict=True)
    outcomes = run_stdio(sandbox, PROGRAM, inputs, outputs, Limits())
    if not all(outcome.passed for outcome in outcomes):
        raise RuntimeError(f"in the sandbox: {outcomes}")


def _called(pool: Pool, tests: int) -> None:
    asserts = [f"assert add({number}, 1) == {number + 1}" for number in range(tests)]
    outcomes = pool.submit(FUNCTION, parse_tests(json.dumps({"asserts": asserts}))).result()
    if not all(outcome.passed for outcome in outcomes):
        raise RuntimeError(f"in the sandbox, by function calls: {outcomes}")


def _throughput(contenders: dict[str, Runner], tests: int, workers: int, repeats: int) -> list[dict[str, Any]]:
    walls: dict[str, list[float]] = {name: [] for name in contenders}
    latencies: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in track(range(repeats), description="measuring", transient=True):
        for name, runner in contenders.items():
            start = time.perf_counter()
            with ThreadPoolExecutor(workers) as pool:
                latencies[name] += pool.map(lambda _, runner=runner: _seconds(runner, tests), range(PROGRAMS))
            walls[name].append(time.perf_counter() - start)

    table = Table()
    for column in ("contender", f"{PROGRAMS} programs", "ratio (min–max)", "programs/s", "p50", "p95"):
        table.add_column(column, justify="left" if column == "contender" else "right")
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


def _seconds(runner: Runner, tests: int) -> float:
    start = time.perf_counter()
    runner(tests)
    return time.perf_counter() - start


def _percentiles(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=20)
    return cuts[9], cuts[18]


def _starts(sandbox: Sandbox, repeats: int) -> list[dict[str, Any]]:
    python = [os.path.realpath(sys._base_executable), *INTERPRETER_FLAGS]  # type: ignore[attr-defined]
    bwrap = sandbox.command(Limits())
    steps: dict[str, Callable[[], object]] = {
        "a process": lambda: subprocess.run(["/bin/true"], check=True),
        "the interpreter": lambda: subprocess.run([*python, "-c", "pass"], check=True),
        "bubblewrap, empty program": lambda: subprocess.run([*bwrap, "/usr/bin/true"], check=True),
        "bubblewrap, interpreter": lambda: subprocess.run([*bwrap, *python, "-c", "pass"], check=True),
        "… limits and filter": lambda: _ready(sandbox),
        "… program and 1 test": lambda: _sandboxed(sandbox, 1),
        "… program and 5 tests": lambda: _sandboxed(sandbox, 5),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(STARTS * repeats // 5 or 1), description="measuring", transient=True):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return measure.show("what a start consists of, one at a time", taken)


def _ready(sandbox: Sandbox) -> None:
    limits = Limits()
    process = sandbox.start("ready", limits=limits, stdin=None, stdout=None)
    if process.wait() != 0:
        raise RuntimeError("the sandbox did not start")
