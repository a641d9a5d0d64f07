"""Compiles every variant of the tile kernels for one target: ``python -m <this> cuda bfloat16``."""

from __future__ import annotations

import sys

import torch

from tests.trust_region.kernels.ahead_of_time import launches_compile_only
from troll.trust_region.kernels import tile_triton
from troll.trust_region.kernels.tile import Outside, TileGradient, Transform


def launch_all(dtype: torch.dtype) -> None:
    for width, slots, transform in ((640, 64, Transform()), (1, 1, Transform(0.7, 0.5, 30.0))):
        tile, token_ids = torch.zeros(2, width, dtype=dtype), torch.zeros(2, slots, dtype=torch.int64)
        on_support, row = torch.zeros(2, slots), torch.zeros(2)
        for entropy in (False, True):
            outside = Outside.empty(on_support, 2, entropy)
            tile_triton.fold_support(tile, 0, transform, token_ids, on_support, outside)
            entropies = (row, row) if entropy else (None, None)
            of = TileGradient(row, row, on_support, row, *entropies)
            tile_triton.gradient(tile, 0, transform, token_ids, of)
        tile = torch.zeros(2, 64 if width == 1 else width, dtype=dtype)
        logits_at, _, _ = tile_triton.fold_blocks(tile, 0, width, transform, token_ids[:, 0], row)
        logits_at(torch.zeros(2, 64, dtype=torch.int64))


if __name__ == "__main__":
    with launches_compile_only(sys.argv[1]) as kernels:
        launch_all(getattr(torch, sys.argv[2]))
    for kernel in kernels:
        print(kernel.metadata.name, *(len(kernel.asm[binary]) for binary in ("cubin", "hsaco") if binary in kernel.asm))
