"""Logits as a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .source import LogitsSource, Reading, slices
from .tiles import Support, TensorRows, Tile, Upstream, rows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Logits that torch holds in float32 at once: a copy of all would be larger than the model's own.
TILE_LOGITS = 2**24


@dataclass(frozen=True, eq=False)
class Logits(LogitsSource):
    """A tensor of logits as a source, read as `softcap · tanh(scale · logits / softcap) / temperature`.

    A view such as `logits[:, :-1]` is read in place, without a copy.

    Attributes:
        logits: (..., V), aligned with the tokens; a process's slice (..., V/n) with `vocab_group`.
        temperature: The sampling temperature, which divides the logits here; None if they already are, as a
            tensor's in place of a source: then a step's temperature is not compared with that of the capture.
        scale: The factor of the logits, above 0.
        softcap: The softcap of the scaled logits, above 0; None for none.
        rows: The rows of (L, V) logits to use as token positions, (N,) integers, without the copy that indexing would
            make; None for all. They must be different, which is not checked: a row that occurs twice would lose the
            gradient of one position; and in [0, L), which is checked on a CPU only.
        donate: Whether the backward pass writes the gradient over the logits, so that no second tensor of their size is
            made. Then nothing else may need the logits, and a second backward pass raises RuntimeError. This is for
            whole tensors only, with none of the settings above except for `rows`.
        vocab_group: The n processes over which the vocabulary is spread; the process of rank r holds the tokens
            `[r·V/n, (r + 1)·V/n)`. All processes get the same results, bit for bit. A capture takes one all-gather of 3
            min(K, V/n) + 2 numbers a token, a step one all-reduce of K + 2n, and its backward pass nothing.

    Raises:
        ValueError: If the logits are not floating point (..., V), settings are out of their range, rows do not fit, or
            the logits cannot be donated.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("logits",)
    logits: Tensor
    temperature: float | None = 1.0
    scale: float = 1.0
    softcap: float | None = None
    rows: Tensor | None = None
    donate: bool = False
    vocab_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.check("logits", self.logits, "V")
        if not self.donate:
            return
        if self.temperature not in (None, 1.0) or self.scale != 1.0 or self.softcap is not None:
            raise ValueError("donate=True takes logits as they are: temperature and scale 1, no softcap")
        if not is_whole(self.logits):
            raise ValueError("donate=True takes a whole tensor of logits, got a view of a part: the rest would be lost")

    @property
    def width(self) -> int:
        """The number of vocabulary entries that this process holds."""
        return self.logits.shape[-1]

    def reading(self, tile: type[Tile], dtype: torch.dtype | None = None) -> AbstractContextManager[Reading]:
        """See the parent."""
        return nullcontext(_LogitsReading(self, tile))


def is_whole(logits: Tensor) -> bool:
    """Whether logits fill their memory, so that they can be donated."""
    return logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.nbytes


class _LogitsReading(Reading):
    def __init__(self, source: Logits, tile: type[Tile]) -> None:
        logits = source.logits
        super().__init__(source, tile, logits.dtype)
        self._donate, self._shape = source.donate, logits.shape
        # Columns that are not contiguous would be slow to read, and are rare enough for a copy.
        self._logits = logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()
        try:
            self._rows = TensorRows(self._logits.view(-1, logits.shape[-1]), self.row_index)
        except RuntimeError:  # rows at no constant distance, as in logits[:, :-1]
            self._rows = TensorRows(self._logits)

    def tiles(self, whole_rows: bool = False) -> Iterator[Tile]:
        """See the parent: the tiles always have whole rows."""
        step = TILE_LOGITS // self._shape[-1] if self.tile.copies else self.tokens
        for rows in slices(self.tokens, max(1, step)):
            yield self.tile.of_tensor(self._rows, self.transform, self.vocabulary.start, rows)

    def gradients(self, support: Support, upstream: Upstream, needed: Sequence[bool]) -> list[Tensor | None]:
        """See the parent; every row is written once."""
        logits = self._logits
        out = logits if self._donate else torch.empty(self._shape, dtype=logits.dtype, device=logits.device)
        rows = TensorRows(out, self.row_index)
        for tile in self.tiles():
            tile.write_gradient(rows_of(support, tile.rows), rows_of(upstream, tile.rows), rows)
        if self.row_index is not None:
            unread = torch.ones(self._shape[0], dtype=torch.bool, device=logits.device)
            self.tile.clear(out, unread.index_fill_(0, self.row_index, False))
        if self._donate:
            # Autograd does not see a kernel's writes, but must know that logits saved elsewhere have been overwritten.
            torch.autograd.graph.increment_version(logits)
        return [out]
