"""Sizes and warps of a reading's kernels: from a table, or tuned on the GPU that they run on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ..kernels import switched_on

#: The environment variable for tuning. 0 keeps to the table; otherwise the first large launch on a GPU, for each width
#: and dtype, tries the table's neighbours too.
AUTOTUNE_VARIABLE = "TROLL_AUTOTUNE"

#: Columns and warps of a program, by kernel and bytes of a number: two 16-byte loads in each thread, so that much data
#: is on its way, and few warps, so that a reduction does not wait for many.
TABLE = {
    "read_kernel": {2: (2048, 4), 4: (1024, 4)},
    "block_sums_kernel": {2: (2048, 4), 4: (1024, 4)},
    "gradient_kernel": {2: (2048, 4), 4: (1024, 4)},
    "products_kernel": {2: (256, 4), 4: (128, 4)},
}

#: The numbers of each warp among which `select_kernel` selects: more would not stay in registers.
SELECTED_A_WARP = 256

#: The smallest number of rows to tune on: with fewer, multiprocessors are idle, and times do not carry over to more
#: rows.
MIN_TUNED_ROWS = 512


def sizes_of(name: str, width: int, dtype: torch.dtype) -> dict[str, int]:
    """The table's `COLUMNS` and `num_warps` for a kernel that reads this dtype; no more columns than a tile is wide."""
    columns, warps = TABLE[name][dtype.itemsize]
    return {"COLUMNS": min(columns, max(128, triton.next_power_of_2(width))), "num_warps": warps}


def select_warps(numbers: int) -> int:
    """The warps of a program that selects among this many numbers (a power of 2)."""
    return min(max(numbers // SELECTED_A_WARP, 4), 16)


def launcher(
    kernel: Any, grid: Any, rows: int, width: int, values: Tensor, *, restore: tuple[str, ...] | None = ()
) -> Any:
    """`kernel[grid]`, with its `COLUMNS` and `num_warps` filled in.

    Args:
        kernel: A kernel of `TABLE`.
        grid: The launch grid, or a function from the constants to it.
        rows: The rows of the launch.
        width: The columns of the tile.
        values: A tensor with the dtype and device that the kernel reads.
        restore: Names of the arguments that a launch both reads and writes, since tuning launches many times. None if
            they cannot be restored: then the table's sizes are used.
    """
    name = kernel.fn.__name__
    if restore is not None and rows >= MIN_TUNED_ROWS and _tunes(values.device.type):
        return _tuner(kernel, values.element_size(), restore)[grid]
    return functools.partial(kernel[grid], **sizes_of(name, width, values.dtype))


def grid_of(rows: int, width: int) -> Callable[[dict[str, int]], tuple[int, int]]:
    """The grid of a kernel of which each program takes `COLUMNS` of a row."""
    return lambda constants: (rows, triton.cdiv(width, constants["COLUMNS"]))


def candidates(name: str, bytes_each: int) -> list[tuple[int, int]]:
    """The columns and warps that tuning tries: the table's, and those with one of the two halved or doubled."""
    columns, warps = TABLE[name][bytes_each]
    return [(columns, warps), (2 * columns, warps), (columns // 2, warps), (columns, 2 * warps), (columns, warps // 2)]


def _tunes(device_type: str) -> bool:
    return switched_on(AUTOTUNE_VARIABLE) and device_type == "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1"


@functools.cache
def _tuner(kernel: Any, bytes_each: int, restore: tuple[str, ...]) -> Any:
    configs = [
        triton.Config({"COLUMNS": columns}, num_warps=warps)
        for columns, warps in candidates(kernel.fn.__name__, bytes_each)
    ]
    # Triton adds dtypes to the key by itself.
    key = [name for name in ("width", "SOFTCAP", "ENTROPY") if name in kernel.arg_names]
    return triton.autotune(configs, key, restore_value=list(restore))(kernel)
