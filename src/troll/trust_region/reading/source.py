"""The interface of sources of logits, and of a reading: one pass over their tiles."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..checks import check_integers, check_tokens_in, shape_text
from ..kernels import MAX_OUTCOMES, use_triton
from .tiles import Support, Tile, Transform, Upstream
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogitsSource(ABC):
    """Logits of N token positions for a vocabulary, or for this process's slice of it; subclasses are dataclasses."""

    tensor_names: ClassVar[tuple[str, ...]]
    """The fields that get gradients; the token positions are those of the first."""
    temperature: float | None
    scale: float
    softcap: float | None
    rows: Tensor | None
    vocab_group: ProcessGroup | None

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of vocabulary entries that this process holds."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that get gradients."""
        return tuple(getattr(self, name) for name in self.tensor_names)

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return getattr(self, self.tensor_names[0]).shape[:-1] if self.rows is None else self.rows.shape

    def with_tensors(self, *tensors: Tensor | None) -> LogitsSource:
        """The same source with other `tensors`; None in place of a tensor keeps only the settings."""
        other = copy.copy(self)  # not a new source, whose checks refuse None
        vars(other).update(zip(self.tensor_names, tensors, strict=True))  # a dataclass may be frozen
        return other

    def at(self, positions: Tensor) -> LogitsSource:
        """The source at some of its flattened token positions, (n,)."""
        first, *others = self.tensors
        assert first is not None
        other = self.with_tensors(first.reshape(-1, first.shape[-1]), *others)
        vars(other)["rows"] = positions if self.rows is None else self.rows[positions]
        return other

    def tile_class(self, slots: int, max_slots: int = MAX_OUTCOMES) -> type[Tile]:
        """What computes on this source: `TritonTile` for up to `max_slots` numbers a token on a GPU, else `Tile`."""
        first = self.tensors[0]
        assert first is not None
        if not use_triton(first, slots, max_slots):
            return Tile
        from .tiles_triton import TritonTile

        return TritonTile

    @abstractmethod
    def reading(self, tile: type[Tile], dtype: torch.dtype | None = None) -> AbstractContextManager[Reading]:
        """A context manager that gives a `Reading`, and keeps sharded parameters gathered meanwhile.

        Args:
            tile: The class of the tiles, from `tile_class`.
            dtype: The dtype in which logits are computed; None for that of the forward pass, which `Reading.dtype`
                gives.
        """

    @property
    def transform(self) -> Transform:
        """Maps the source's numbers to logits."""
        return Transform(1.0 if self.temperature is None else self.temperature, self.scale, self.softcap)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary entries that this process holds."""
        return Vocabulary.held(self.width, self.vocab_group)

    def check(self, tensor_name: str, tensor: Tensor, last: str) -> None:
        """Raises ValueError unless the settings are in their ranges, and `rows` fit a tensor (..., last)."""
        if tensor.dim() == 0 or not tensor.shape[-1] or not tensor.is_floating_point():
            raise ValueError(
                f"{tensor_name} must be floating point (..., {last}), got {tensor.dtype} {shape_text(tensor.shape)}"
            )
        for name in ("temperature", "scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.rows is None:
            return
        check_integers("rows", self.rows)
        if tensor.dim() != 2 or self.rows.dim() != 1:
            raise ValueError(
                f"rows (N,) go with {tensor_name} (L, {last}), "
                f"got {shape_text(self.rows.shape)} and {shape_text(tensor.shape)}"
            )
        if self.rows.device.type == "cpu":  # on a GPU, this would wait for the device
            check_tokens_in("rows", self.rows, len(tensor))


def slices(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of this size; the last may be smaller. There is at least one, which may be empty."""
    return (slice(start, min(start + size, length)) for start in range(0, max(length, 1), size))


class Reading(ABC):
    """One pass over the tiles of a source, each of the class `tile`, which compute in `dtype`."""

    def __init__(self, source: LogitsSource, tile: type[Tile], dtype: torch.dtype) -> None:
        self.tile, self.dtype = tile, dtype
        self.transform, self.vocabulary = source.transform, source.vocabulary
        #: N, the number of tokens.
        self.tokens = source.shape.numel()
        #: Which rows of the source's tensor they are, (N,); None for all.
        self.row_index = None if source.rows is None else source.rows.long()
        #: The memory of the first tiles, (n, W) each, that the next pass takes instead of computing them: the forward
        #: pass leaves them after `keep`, and autograd's context brings them to the backward pass.
        self.kept: list[Tensor] = []

    def keep(self, needed: Sequence[bool]) -> None:  # noqa: B027
        """Lets the next pass leave tiles in `kept`, if computing them again for `gradients` would cost more.

        Args:
            needed: Which of the source's tensors get gradients.
        """

    @abstractmethod
    def tiles(self, whole_rows: bool = False) -> Iterator[Tile]:
        """Yields all tiles; with `whole_rows`, each has all vocabulary entries that this process holds.

        A tile is lost when the next one is computed, unless it is kept. Without tokens there are tiles without rows.
        """

    def exact(self, ids: Tensor) -> Tensor | None:
        """Logits of single entries in float32, (N, K), if those of the tiles are less precise; else None.

        Args:
            ids: (N, K), in the whole vocabulary; ids that are unused or not in this process's slice get −inf.
        """
        return None

    @abstractmethod
    def gradients(self, support: Support, upstream: Upstream, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the source's tensors, from the numbers of its N tokens; None where they are not needed."""
