"""The logits of an LM head in tiles: those of some tokens for some entries of the vocabulary, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from troll.trust_region.kernels import tile as torch_tile
from troll.trust_region.kernels import use_triton
from troll.trust_region.support import BLOCK

if TYPE_CHECKING:
    from troll.trust_region.head import Head


class Tiles:
    """Makes the tiles of one pass, all in the same memory: allocating each costs as much as its matrix product.

    Args:
        hidden: (N, H).
        head: With its `compute_dtype`.
        slots: What the kernels hold of each token.
        size: Tokens and vocabulary entries of a tile.
    """

    def __init__(self, hidden: Tensor, head: Head, slots: int, size: tuple[int, int]) -> None:
        assert head.compute_dtype is not None
        self.hidden, self.head, self.size = hidden, head, size
        #: What of the vocabulary the head holds.
        self.vocabulary = head.vocabulary
        rows, columns = (min(length, most) for length, most in zip((len(hidden), len(head.weight)), size, strict=True))
        self.memory = hidden.new_empty(rows * _blocks(columns), dtype=head.compute_dtype)
        #: Weights of the last tile in the computing dtype.
        self.weight = head.weight.new_empty(0)
        self.functions: ModuleType = torch_tile
        if use_triton(self.memory, slots):
            from troll.trust_region.kernels import tile_triton

            self.functions = tile_triton

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Some tokens each, and their hidden states in the computing dtype."""
        for rows in _slices(len(self.hidden), self.size[0]):
            yield rows, self.hidden[rows].to(self.memory.dtype)

    def columns(self) -> Iterator[tuple[slice, int]]:
        """Some of the head's rows each, and the vocabulary entry of the first."""
        for columns in _slices(len(self.head.weight), self.size[1]):
            yield columns, self.vocabulary.start + columns.start

    def product(self, hidden: Tensor, columns: slice, *, padded: bool = False) -> Tensor:
        """``hidden @ weight.T + bias`` for some entries, (N, W); undefined columns follow if padded."""
        width = columns.stop - columns.start
        whole = _blocks(width)  # so that rows stay aligned
        tile = self.memory[: len(hidden) * whole].view(len(hidden), whole)
        self.weight = self.head.weight[columns].to(self.memory.dtype)
        _matrix_product(
            hidden, self.weight, None if self.head.bias is None else self.head.bias[columns], tile[:, :width]
        )
        return tile if padded else tile[:, :width]


def _matrix_product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    torch.mm(hidden, weight.t(), out=out)
    if bias is not None:
        out.add_(bias.to(out.dtype))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _blocks(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
