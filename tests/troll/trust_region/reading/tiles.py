"""Tiles for the tests of the Triton kernels: in every form and dtype, next to the logits that they stand for."""

from typing import NamedTuple

import torch
from torch import Tensor

from troll.trust_region.reading.memory_triton import Memory
from troll.trust_region.reading.tiles import TailSums, TensorRows, Tile, Transform
from troll.trust_region.reading.tiles_triton import TritonTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = Transform()

#: The vocabulary entry of the first column.
FIRST = 1000

#: Logits are rounded twice (the factor, the product), by 2⁻²⁴ each, and a tanh is off by 3e-7; three times as much.
LOGIT = 3 * (3e-7 + 2.0**-23)
#: Exponentials turn what logits up to 30 are off into relative errors; so do differences from a maximum of that size.
EXPONENTIAL = 60 * LOGIT
#: The logits of a support, and the sums over all others.
Folded = tuple[Tensor, TailSums]


class Made(NamedTuple):
    """A tile for a kernel, the memory that it is in, and its logits in float64."""

    tile: TritonTile
    source: TensorRows
    memory: Tensor
    logits: Tensor

    def for_torch(self, dtype: torch.dtype = torch.float64) -> Tile:
        """A tile for torch, with memory of its own."""
        tile = self.tile
        return Tile(self.logits.to(dtype, copy=True), tile.transform, tile.first, tile.rows, tile.columns)

    def values(self) -> Tensor:
        """What the memory holds of the tile, (n, W)."""
        memory = self.tile.memory
        if memory.offsets is None:
            return memory.values
        at = memory.offsets.unsqueeze(-1) + torch.arange(memory.width, device=DEVICE)
        return memory.values.as_strided((int(at.max()) + 1,), (1,))[at]


def random_values(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def made(values: Tensor, transform: Transform = PLAIN, form: str = "rows", first: int = FIRST) -> Made:
    """What holds these values, (n, W), with NaN wherever no kernel may look.

    Rows lie at one distance ("rows"), or with "some" others in between, in no order, or have two dimensions ("batch").
    """
    values = values.to(DEVICE)
    rows, width = values.shape
    logits = transform(values.double())
    if form == "rows":
        memory = values.new_full((rows, width + 16), torch.nan)
        memory[:, :width] = values
        source = TensorRows(memory[:, :width])
    elif form == "some":
        memory = values.new_full((2 * rows, width), torch.nan)
        index = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE)
        memory[index] = values
        source = TensorRows(memory, index)
    else:
        memory = values.new_full((rows, 3, width), torch.nan)
        memory[:, 1] = values
        source = TensorRows(memory[:, 1:2])
    every = slice(0, rows)
    tile = TritonTile(Memory.of(source, every), transform, first, every, slice(0, width))
    return Made(tile, source, memory, logits)


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


def assert_folds_agree(actual: Folded, expected: Folded) -> None:
    """Values, and where they are not finite: what the sums are then does not matter, as long as their total is not."""
    (logits, got), (expected_logits, want) = actual, expected
    torch.testing.assert_close(logits.double(), expected_logits, rtol=LOGIT, atol=0, equal_nan=True)
    broken = ~(want.log_sum < torch.inf)
    assert torch.equal(~(got.log_sum < torch.inf), broken)
    assert got.maximum[broken].isnan().all()
    got, want = (TailSums(*(None if x is None else x[~broken].double() for x in sums)) for sums in (got, want))  # type: ignore[arg-type]
    torch.testing.assert_close(got.log_sum, want.log_sum, rtol=0, atol=EXPONENTIAL)
    if got.weighted_sum is not None and want.weighted_sum is not None:
        # Relative to the maximum, which may be an ulp apart, so both are brought to the expected one.
        moved = torch.where(want.maximum > -torch.inf, got.maximum - want.maximum, 0.0)
        weighted = (got.weighted_sum + got.exp_sum * moved) * moved.exp()
        size = want.exp_sum - want.weighted_sum
        assert ((weighted - want.weighted_sum).abs() <= EXPONENTIAL * size + 2.0**-126).all()
