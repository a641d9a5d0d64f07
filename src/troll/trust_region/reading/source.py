"""Sources of logits: what a reading needs to know of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from troll.trust_region.kernels import MAX_OUTCOMES, use_triton
from troll.trust_region.policy.values import check_integers, shape_text
from troll.trust_region.reading import fold
from troll.trust_region.reading.fold import Support, SupportGradient, Tile, Transform
from troll.trust_region.reading.vocabulary import Vocabulary, held_vocabulary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Source(ABC):
    """Logits of N token positions for a vocabulary, or for this process's slice of it; a dataclass of its tensors."""

    temperature: float
    scale: float
    softcap: float | None
    rows: Tensor | None
    vocab_group: ProcessGroup | None

    @property
    @abstractmethod
    def width(self) -> int:
        """How many entries of the vocabulary this process holds."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What gradients go to."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The token positions, (...)."""

    @abstractmethod
    def with_tensors(self, *tensors: Tensor | None) -> Source:
        """The same source of other `tensors`; None drops them, for keeping the settings only."""

    @abstractmethod
    def opened(self, slots: int, most: int = MAX_OUTCOMES, dtype: torch.dtype | None = None) -> Any:
        """A context manager that gives a `Pass`, while what the source is made of is at hand.

        Args:
            slots: What a kernel holds of each token.
            most: More than so many slots are left to torch.
            dtype: In which logits are computed; None for what the forward pass takes. `dtype` says it.
        """

    @property
    def transform(self) -> Transform:
        """From what the source holds to logits."""
        return Transform(self.temperature, self.scale, self.softcap)

    @property
    def vocabulary(self) -> Vocabulary:
        """What of the vocabulary this process holds."""
        return held_vocabulary(self.width, self.vocab_group)

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


class Part(NamedTuple):
    """A tile, and where it belongs."""

    rows: slice
    """Of the N tokens."""
    columns: slice
    """Of the vocabulary entries that this process holds."""
    tile: Tile


class Pass(ABC):
    """One pass over the tiles of a source.

    Args:
        source: See there.
        memory: A tensor of the dtype and device of the tiles.
        slots: What a kernel holds of each token.
        most: More than so many slots are left to torch.
    """

    def __init__(self, source: Source, memory: Tensor, slots: int, most: int) -> None:
        self.transform, self.vocabulary = source.transform, source.vocabulary
        self.dtype = memory.dtype
        #: `fold`, or its counterpart for a GPU.
        self.functions: ModuleType = fold
        if use_triton(memory, slots, most):
            from troll.trust_region.reading import fold_triton

            self.functions = fold_triton

    @property
    def is_torch(self) -> bool:
        """Whether tiles hold logits that the functions may use up; else what the source holds."""
        return self.functions is fold

    @abstractmethod
    def parts(self, whole_rows: bool = False) -> Iterator[Part]:
        """All tiles; with `whole_rows`, each has all entries that this process holds.

        A tile is lost as the next one is made.
        """

    def exact(self, ids: Tensor) -> Tensor | None:
        """Logits of single entries in float32, (N, K), where those of the tiles are less precise; else None.

        Args:
            ids: (N, K), in the whole vocabulary; what is unused or not this process's gets −inf.
        """
        return None

    @abstractmethod
    def new_gradients(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Sums of the gradients of the source's tensors, where they are needed."""

    @abstractmethod
    def add_gradient(self, sums: list[Tensor | None], part: Part, support: Support, of: SupportGradient) -> None:
        """Adds what comes of a tile to the sums."""

    @abstractmethod
    def finished(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients, once all tiles are added."""


PassContext = AbstractContextManager[Pass]
