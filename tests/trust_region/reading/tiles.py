"""Tiles for the tests of the Triton kernels: in every form and dtype, next to the logits that they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troll.trust_region.reading.fold import Tile, Transform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS = {
    "plain": Transform(),
    "temperature": Transform(temperature=0.7),
    "scale": Transform(scale=0.25),
    "softcap": Transform(softcap=8.0),
    "all": Transform(1.3, 1.7, 5.0),
}

#: The vocabulary entry of the first column.
FIRST = 1000

#: Rows that lie at one distance; rows with others in between, in no order; and those of two dimensions.
FORMS = ("rows", "some", "batch")


class Made(NamedTuple):
    """A tile for a kernel, the memory that it is in, and its logits in float64."""

    tile: Tile
    memory: Tensor
    logits: Tensor

    def for_torch(self, dtype: torch.dtype = torch.float64) -> Tile:
        """A tile for the torch functions, with memory of its own."""
        return self.tile._replace(values=self.logits.to(dtype, copy=True), offsets=None)


def random_values(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def made(values: Tensor, transform: Transform = TRANSFORMS["plain"], form: str = "rows", first: int = FIRST) -> Made:
    """What holds these values, (n, W), with NaN wherever no kernel may look."""
    rows, width = values.shape
    logits = transform(values.double())
    if form == "rows":
        memory = values.new_full((rows, width + 16), torch.nan)
        memory[:, :width] = values
        return Made(Tile(memory[:, :width], first, width, transform), memory, logits)
    if form == "some":
        memory = values.new_full((2 * rows, width), torch.nan)
        index = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE)
        memory[index] = values
        return Made(Tile(memory, first, width, transform, index * width), memory, logits)
    memory = values.new_full((rows, 3, width), torch.nan)
    memory[:, 1] = values
    view = memory[:, 1:2]
    return Made(Tile(view, first, width, transform, torch.arange(rows, device=DEVICE) * view.stride(0)), memory, logits)


def values_of(tile: Tile) -> Tensor:
    """What a tile holds, (n, W)."""
    if tile.offsets is None:
        return tile.values
    at = tile.offsets.unsqueeze(-1) + torch.arange(tile.width, device=DEVICE)
    return tile.values.as_strided((int(at.max()) + 1,), (1,))[at]


def unchanged(before: Tensor, after: Tensor) -> bool:
    """Bit for bit, NaN included."""
    same_size = {2: torch.int16, 4: torch.int32}[before.element_size()]
    return torch.equal(before.view(same_size), after.view(same_size))


def some_ids(rows: int, slots: int, low: int, high: int, unused: int = 0) -> Tensor:
    """Different ids in [low, high) for every row, in any order, and some unused slots."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([low + torch.randperm(high - low, generator=generator)[:slots] for _ in range(rows)])
    ids[:, slots - unused :] = -1
    return ids.to(DEVICE)
