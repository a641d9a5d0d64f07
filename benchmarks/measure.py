"""Measures contenders: times in turn, ratios to the first one, and memory in separate processes."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

Contenders = Mapping[str, Callable[[], object]]
#: Makes contenders from a case and a device. It is a module's function, so that another process can call it too.
Maker = Callable[..., Contenders]

MEGABYTE = 1 << 20

#: `--small`: whether shapes are tiny, and only check that everything runs.
small = False

#: The case that runs before peak memory is measured, since libraries load and set up much at their first call.
WARM_UP = {"tokens": 8, "vocabulary": 1024}


def shapes(device: str) -> str:
    """The name of the shapes to measure: the device's, or "small"."""
    return "small" if small else device


class Skipped(Exception):
    """Raised when a benchmark, or a part of one, cannot run here, with the reason."""


class Unusable(Exception):
    """Another package's contender is not installed here, or does not run on this device."""


def seconds(
    contenders: Contenders, repeats: int, device: str, skipped: dict[str, str] | None = None
) -> dict[str, list[float]]:
    """Times of each contender, all of them in turn in every round, after one round to warm up.

    A contender that is `Unusable` in that round is left out; a line says why, and `skipped` receives the reason.
    """
    taken: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        try:
            contender()
            taken[name] = []
        except Unusable as error:
            Console().print(f"skipped: {name} ({error})")
            if skipped is not None:
                skipped[name] = str(error)
    for _ in track(range(repeats), description="measuring", transient=True):
        for name, times in taken.items():
            gc.collect()
            times.append((_on_gpu if device == "cuda" else elapsed)(contenders[name]))
    return taken


def foreign(contender: Callable[[], object]) -> Callable[[], None]:
    """Wraps a contender from another package: any error in it becomes `Unusable`."""

    def run() -> None:
        try:
            contender()
        except ImportError as error:
            raise Unusable(f"{error.name or error} is not installed") from error
        except Exception as error:
            raise Unusable(f"{type(error).__name__}: {str(error)[:100]}") from error

    return run


def compare(
    title: str, cases: Mapping[str, Mapping[str, Any]], maker: Maker, repeats: int, device: str
) -> list[dict[str, Any]]:
    """Times and peak memory of contenders for cases by name, printed; returns a row of each."""
    rows = []
    skipped: dict[str, str] = {}
    for name, case in cases.items():
        taken = seconds(maker(**case, device=device), repeats, device, skipped)
        peaks = peak_memory(maker, case, list(taken), device)
        described = ", ".join(f"{key} {value}" for key, value in case.items())
        rows += [{"case": name, **case, **row} for row in show(f"{title}: {name}, {described}", taken, peaks)]
        rows += [{"case": name, "contender": contender, "skipped": why} for contender, why in skipped.items()]
        skipped.clear()
    return rows


def elapsed(contender: Callable[[], object]) -> float:
    """The seconds of a call on the CPU."""
    start = time.perf_counter()
    contender()
    return time.perf_counter() - start


def _on_gpu(contender: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    contender()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def peak_memory(maker: Maker, case: Mapping[str, Any], names: list[str], device: str) -> dict[str, float]:
    """Peak bytes of one call of each contender, inputs included; on a CPU each in a fresh process."""
    peaks = {}
    if device == "cuda":  # only torch's allocations count there, and a process takes seconds to start
        return {name: _peak_on_gpu(maker(device=device, **case)[name]) for name in names}
    for name in track(names, description="memory", transient=True):
        request = json.dumps([maker.__module__, maker.__name__, dict(case), name, device])
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.measure", request], capture_output=True, text=True, check=False
        )
        if output.returncode:
            raise RuntimeError(f"{name} failed:\n{output.stderr}")
        peaks[name] = float(output.stdout.split()[-1])
    return peaks


def _peak_on_gpu(contender: Callable[[], object]) -> float:
    gc.collect()
    contender()  # setting up at the first call does not count
    gc.collect()  # a trainer is in reference cycles
    torch.cuda.reset_peak_memory_stats()
    contender()
    return torch.cuda.max_memory_allocated()


def _peak_of(module: str, function: str, case: dict[str, Any], name: str, device: str) -> float:
    maker: Maker = getattr(import_module(module), function)
    first = {key: min(value, WARM_UP.get(key, value)) for key, value in case.items()}
    if first != case:
        maker(device=device, **first)[name]()
    before = _resident("VmRSS")
    contender = maker(device=device, **case)[name]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which making the inputs has raised
    contender()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def show(
    title: str, taken: Mapping[str, list[float]], peaks: Mapping[str, float] | None = None
) -> list[dict[str, float | str]]:
    """Prints times and peaks with their ratios to the first contender's, and returns the rows."""
    baseline, *_ = taken
    table = numbers("contender", "median", "ratio (min–max)", *(("peak MB", "ratio") if peaks else ()))
    rows: list[dict[str, float | str]] = []
    for name, times in taken.items():
        ratios = [time / base for time, base in zip(times, taken[baseline], strict=True)]
        row: dict[str, float | str] = {
            "contender": name,
            "seconds": statistics.median(times),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        cells = [name, duration(statistics.median(times)), ratio_text(ratios)]
        if peaks:
            row |= {"peak_bytes": peaks[name], "peak_ratio": peaks[name] / peaks[baseline]}
            cells += [f"{peaks[name] / MEGABYTE:.0f}", f"{peaks[name] / peaks[baseline]:.2f}"]
        table.add_row(*cells)
        rows.append(row)
    Console(width=110).print(title, table)
    return rows


def numbers(*columns: str, names: int = 1, **options: Any) -> Table:
    """An empty table of numbers.

    Args:
        *columns: The headings.
        names: How many columns, the first ones, have text, and are left-justified.
        **options: Those of `rich.table.Table`.
    """
    table = Table(*columns, **options)
    for column in table.columns[names:]:
        column.justify = "right"
    return table


def ratio_text(ratios: list[float]) -> str:
    """The median of ratios and their range, as text."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def duration(value: float) -> str:
    """Seconds, in the unit that suits them."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def environment(device: str) -> dict[str, Any]:
    """The hardware and the versions with which a figure was measured."""
    versions = {}
    for package in ("torch", "triton", "trl", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device == "cuda" else None,
        **versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line for line in lines if line.startswith("model name")]
    return models[0].split(":")[1].strip() if models else platform.machine()


if __name__ == "__main__":
    print(_peak_of(*json.loads(sys.argv[1])))
