"""The fused head as tokens, K and V grow: one of them at a time, medians relative to the smallest."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console

from benchmarks import capture, head, measure

PASSES: dict[str, measure.Maker] = {"forward and backward": head.contenders, "capture": capture.contenders}

#: The values of the others while one grows.
BASE: dict[str, dict[str, int]] = {
    "cpu": {"tokens": 128, "vocabulary": 32_768, "width": 256, "top_k": 64},
    "cuda": {"tokens": 8192, "vocabulary": 131_072, "width": 2560, "top_k": 64},
    "small": {"tokens": 8, "vocabulary": 1024, "width": 16, "top_k": 8},
}
GROWTH: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"tokens": (128, 512, 1024), "top_k": (16, 64, 256), "vocabulary": (32_768, 131_072, 262_144)},
    "cuda": {"tokens": (2048, 8192, 32_768), "top_k": (16, 64, 256), "vocabulary": (32_768, 131_072, 262_144)},
    "small": {"tokens": (8, 16), "top_k": (8,)},
}


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints a table for each quantity that grows."""
    results = []
    shapes = measure.shapes(device)
    peaks: dict[str, float] = {}
    for grows, values in GROWTH[shapes].items():
        table = measure.numbers(grows, *(name for each in PASSES for name in (each, "ratio", "peak MB")), names=0)
        base: dict[str, float] = {}
        for value in values:
            case = BASE[shapes] | {grows: value}
            taken = measure.seconds(
                {name: maker(**case, device=device)[head.FUSED] for name, maker in PASSES.items()}, repeats, device
            )
            cells = []
            for name, times in taken.items():
                median = statistics.median(times)
                ratio = median / base.setdefault(name, median)
                shape = f"{name} {case}"
                if shape not in peaks:  # the smallest is in every table
                    peaks[shape] = measure.peak_memory(PASSES[name], case, [head.FUSED], device)[head.FUSED]
                peak = peaks[shape]
                cells += [measure.duration(median), f"{ratio:.2f}", f"{peak / measure.MEGABYTE:.0f}"]
                results.append({"grows": grows, **case, "pass": name, "seconds": times, "peak_bytes": peak})
            table.add_row(str(value), *cells)
        fixed = ", ".join(f"{key} {value}" for key, value in BASE[shapes].items() if key != grows)
        Console(width=110).print(f"scaling with {grows}: {fixed}", table)
    return results
