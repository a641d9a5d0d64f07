"""Registers and shared memory of the Triton kernels, compiled for an H100 or H200; this needs no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from benchmarks import measure
from tests.troll.trust_region.ahead_of_time import compiled

#: Limits of a multiprocessor of compute capability 9.0: registers, bytes of shared memory, warps, programs.
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 * 1024, 64, 32


def programs(registers: int, shared: int, warps: int) -> int:
    """The number of programs of a kernel that one multiprocessor runs at a time."""
    per_warp = -(-registers // 8) * 8 * 32  # registers are given out by 8 a thread
    limits = [WARPS // warps, PROGRAMS, REGISTERS // (per_warp * warps)]
    return min([*limits, SHARED // (shared + 1024)])  # 1 KB of shared memory is the system's


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Prints registers, spills and shared memory of each kernel in each variant; its arguments are not used."""
    columns = ("kernel", "variant", "warps", "registers", "stack, B", "shared, B", "programs", "widest load, B")
    table = measure.numbers(*columns, names=2)
    rows = []
    for kernel in compiled("cuda"):
        assert kernel.registers is not None
        row = dataclasses.asdict(kernel) | {"programs": programs(kernel.registers, kernel.shared, kernel.warps)}
        rows.append(row)
        numbers = ("warps", "registers", "spilled", "shared", "programs", "widest_load")
        table.add_row(kernel.kernel.strip("_"), kernel.variant, *(str(row[name]) for name in numbers))
    Console(width=130).print("sm_90, a program and a multiprocessor", table)
    return rows
