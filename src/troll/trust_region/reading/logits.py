"""Logits as a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from troll.trust_region.kernels import MAX_OUTCOMES
from troll.trust_region.policy.values import as_float
from troll.trust_region.reading import fold
from troll.trust_region.reading.fold import Support, SupportGradient, Tile
from troll.trust_region.reading.source import Part, Pass, PassContext, Source

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Logits that torch holds in float32 at a time: a copy of all would be larger than the model's own.
TILE_LOGITS = 2**24


@dataclass(frozen=True, eq=False)
class Logits(Source):
    """Logits that are there: ``softcap · tanh(scale · logits / softcap) / temperature``.

    A view such as ``logits[:, :-1]`` is read in place, without a copy.

    Attributes:
        logits: (..., V), aligned with the tokens; a process's slice (..., V/n) with `vocab_group`.
        temperature: The sampling temperature; 1 where the logits are already divided by it.
        scale: Above 0; what they are multiplied by.
        softcap: Above 0, or None.
        rows: Which rows of (L, V) logits are the positions, (N,) integers: spares the copy of an indexing. All
            different and at least 0, which is not checked: of a row that is there twice, one position's gradient would
            be lost.
        donate: Gives the logits up: the backward pass writes their gradient in their place, so that no second tensor of
            their size is made. Nothing else may need them then, and a second backward pass raises RuntimeError. For
            whole tensors only, with none of the settings above but `rows`.
        vocab_group: The n processes over which the vocabulary is spread, the one of rank r holding the tokens
            ``[r·V/n, (r + 1)·V/n)``. All get the same results, bit for bit. A capture takes one all-gather of
            3 min(K, V/n) + 2 numbers a token, a step one all-reduce of K + 2n, and its backward pass nothing.

    Raises:
        ValueError: On logits that are not floating point (..., V), settings out of their range, rows that do not fit,
            or logits that cannot be donated.
    """

    logits: Tensor
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    rows: Tensor | None = None
    donate: bool = False
    vocab_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.check("logits", self.logits, "V")
        if not self.donate:
            return
        if self.temperature != 1.0 or self.scale != 1.0 or self.softcap is not None:
            raise ValueError("donate=True takes logits as they are: temperature and scale 1, no softcap")
        if not is_whole(self.logits):
            raise ValueError("donate=True takes a whole tensor of logits, got a view of a part: the rest would be lost")

    @property
    def width(self) -> int:
        """How many entries of the vocabulary this process holds."""
        return self.logits.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The logits."""
        return (self.logits,)

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.logits.shape[:-1] if self.rows is None else self.rows.shape

    def with_tensors(self, *tensors: Tensor | None) -> Logits:
        """See the parent."""
        other = object.__new__(Logits)  # no checks: None stands in for a tensor
        vars(other).update(vars(self), logits=tensors[0])
        return other

    def opened(self, slots: int, most: int = MAX_OUTCOMES, dtype: torch.dtype | None = None) -> PassContext:
        """See the parent."""
        return nullcontext(_LogitsPass(self, slots, most))


def is_whole(logits: Tensor) -> bool:
    """Whether logits fill their memory, so that they can be donated."""
    return logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.nbytes


class _LogitsPass(Pass):
    def __init__(self, source: Logits, slots: int, most: int) -> None:
        logits = source.logits
        super().__init__(source, logits, slots, most)
        self._donate, self._shape, self._tokens = source.donate, logits.shape, source.shape.numel()
        self._index = None if source.rows is None else source.rows.long()
        # Columns that lie apart would be slow to read, and are rare enough for a copy.
        self._logits = logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()
        try:
            self._rows: Tensor | None = self._logits.view(-1, logits.shape[-1])
        except RuntimeError:  # rows at no constant distance, as in logits[:, :-1]
            self._rows = None

    def parts(self, whole_rows: bool = False) -> Iterator[Part]:
        """See the parent: whole rows always."""
        width = self._shape[-1]
        step = max(1, TILE_LOGITS // width) if self.is_torch else max(1, self._tokens)
        for start in range(0, self._tokens, step):
            rows = slice(start, min(start + step, self._tokens))
            values, offsets = (self._own(rows), None) if self.is_torch else self._in_place(rows)
            yield Part(rows, slice(0, width), Tile(values, self.vocabulary.start, width, self.transform, offsets))

    def _own(self, rows: slice) -> Tensor:
        """(n, V) logits in memory of their own."""
        if self._rows is not None:
            raw = self._rows[rows if self._index is None else self._index[rows]]
            z = as_float(raw)
            return self.transform(z.clone() if z is raw and self._index is None else z)
        at = torch.arange(rows.start, rows.stop, device=self._logits.device)
        return self.transform(as_float(self._logits[torch.unravel_index(at, self._shape[:-1])]))

    def _in_place(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The logits, and where their rows begin."""
        if self._rows is not None and self._index is None:
            return self._rows[rows], None
        if self._index is not None:
            assert self._rows is not None
            return self._rows, self._index[rows] * self._rows.stride(0)
        first, *others = (
            torch.arange(0, size * stride, stride, device=self._logits.device)
            if stride
            else torch.zeros(size, dtype=torch.int64, device=self._logits.device)
            for size, stride in zip(self._shape[:-1], self._logits.stride(), strict=False)
        )
        for offsets in others:
            first = first.unsqueeze(-1) + offsets
        return self._logits, first.flatten()[rows]

    def new_gradients(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """See the parent."""
        if self._donate:
            return [self._logits]
        return [torch.empty(self._shape, dtype=self._logits.dtype, device=self._logits.device)]

    def add_gradient(self, sums: list[Tensor | None], part: Part, support: Support, of: SupportGradient) -> None:
        """See the parent; every row is written once."""
        assert sums[0] is not None
        rows = sums[0].view(-1, self._shape[-1])
        if self.is_torch:
            values = fold.gradient(part.tile, support, of).to(rows.dtype)
            rows[part.rows if self._index is None else self._index[part.rows]] = values
        elif self._index is None:
            self.functions.gradient(part.tile, support, of, part.tile._replace(values=rows[part.rows], offsets=None))
        else:
            offsets = self._index[part.rows] * rows.stride(0)
            self.functions.gradient(part.tile, support, of, part.tile._replace(values=rows, offsets=offsets))

    def finished(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """See the parent."""
        assert sums[0] is not None
        if self._index is not None:
            unread = torch.ones(self._shape[0], dtype=torch.bool, device=self._logits.device)
            self.functions.clear(sums[0], unread.index_fill_(0, self._index, False))
        if self._donate:
            # A kernel's writes do not tell autograd that what others may have saved is gone.
            torch.autograd.graph.increment_version(self._logits)
        return sums
