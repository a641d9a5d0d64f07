"""How the kernels of a reading are launched: sizes and warps from a table, or tuned on the GPU that they run on."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
from torch import Tensor

#: 0 keeps to the table. Otherwise the first large launch on a GPU, for each width and dtype, tries the neighbours too.
VARIABLE = "TROLL_AUTOTUNE"

#: Columns and warps of a program, by kernel and bytes of a number: two 16-byte loads a thread, so that much is on its
#: way, and few warps, so that a reduction does not wait for many.
TABLE = {
    "_fold_support_kernel": {2: (2048, 4), 4: (1024, 4)},
    "_block_maxima_kernel": {2: (2048, 4), 4: (1024, 4)},
    "_gradient_kernel": {2: (2048, 4), 4: (1024, 4)},
    "_products_kernel": {2: (256, 4), 4: (128, 4)},
}

#: Of the numbers among which `_select_kernel` selects, so many to a warp: more would not stay in registers.
SELECTED_A_WARP = 256

#: Fewer rows leave multiprocessors idle at any size: times would say nothing of larger batches.
MIN_TUNED_ROWS = 512


def launch(name: str, width: int, dtype: torch.dtype) -> dict[str, int]:
    """The table's constants for a kernel: ``COLUMNS`` and ``num_warps``.

    Args:
        name: A key of `TABLE`.
        width: How many columns there are; more are not held.
        dtype: Of what is read.
    """
    columns, warps = TABLE[name][dtype.itemsize]
    return {"COLUMNS": min(columns, max(128, triton.next_power_of_2(width))), "num_warps": warps}


def select_warps(numbers: int) -> int:
    """Warps of a program that selects among so many numbers (a power of 2)."""
    return min(max(numbers // SELECTED_A_WARP, 4), 16)


def launcher(
    kernel: Any, grid: Any, rows: int, width: int, like: Tensor, *, restore: tuple[str, ...] | None = ()
) -> Any:
    """``kernel[grid]``, with its ``COLUMNS`` and ``num_warps`` filled in.

    Args:
        kernel: One of `TABLE`.
        grid: Takes the constants where it depends on them.
        rows: How many rows are launched.
        width: How many columns.
        like: A tensor with dtype and device of what is read.
        restore: Names of the arguments that a launch reads and writes: while sizes are tried, it runs many times. None
            where they cannot be restored, which leaves the table's sizes.
    """
    name = kernel.fn.__name__
    if restore is not None and rows >= MIN_TUNED_ROWS and _tunes(like.device.type):
        return _tuner(kernel, like.element_size(), restore)[grid]
    return functools.partial(kernel[grid], **launch(name, width, like.dtype))


def candidates(name: str, bytes_each: int) -> list[tuple[int, int]]:
    """Columns and warps that are tried: the table's, and all with one of the two halved or doubled."""
    columns, warps = TABLE[name][bytes_each]
    return [(columns, warps), (2 * columns, warps), (columns // 2, warps), (columns, 2 * warps), (columns, warps // 2)]


def _tunes(device_type: str) -> bool:
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {wanted!r}")
    return wanted == "1" and device_type == "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1"


@functools.cache
def _tuner(kernel: Any, bytes_each: int, restore: tuple[str, ...]) -> Any:
    configs = [
        triton.Config({"COLUMNS": columns}, num_warps=warps)
        for columns, warps in candidates(kernel.fn.__name__, bytes_each)
    ]
    # dtypes belong to the key without being named.
    key = [name for name in ("width", "SOFTCAP", "ENTROPY") if name in kernel.arg_names]
    return triton.autotune(configs, key, restore_value=list(restore))(kernel)
