"""What the Triton kernels compile to for an H100 or H200, which need not be there: nothing is timed."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.trust_region.ahead_of_time import compiled

#: Of a multiprocessor of compute capability 9.0: registers, bytes of shared memory, warps, programs.
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 * 1024, 64, 32


def programs(registers: int, shared: int, warps: int) -> int:
    """How many programs of a kernel one multiprocessor runs at a time."""
    per_warp = -(-registers // 8) * 8 * 32  # registers are given out by 8 a thread
    limits = [WARPS // warps, PROGRAMS, REGISTERS // (per_warp * warps)]
    return min([*limits, SHARED // (shared + 1024)])  # 1 KB of shared memory is the system's


def main(device: str, repeats: int) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of each kernel in each variant; `device` and `repeats` do not matter."""
    table = Table()
    columns = ("kernel", "variant", "warps", "registers", "stack, B", "shared, B", "programs", "widest load, B")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    rows = []
    for kernel in compiled("cuda"):
        assert kernel.registers is not None
        row = dataclasses.asdict(kernel) | {"programs": programs(kernel.registers, kernel.shared, kernel.warps)}
        rows.append(row)
        numbers = ("warps", "registers", "spilled", "shared", "programs", "widest_load")
        table.add_row(kernel.kernel.strip("_"), kernel.variant, *(str(row[name]) for name in numbers))
    Console(width=130).print("sm_90, a program and a multiprocessor", table)
    return rows
