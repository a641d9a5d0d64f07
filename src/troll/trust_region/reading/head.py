"""The logits of an LM head, which are never multiplied out: a (tokens x vocabulary) tensor is not made.

A tile is the product of some tokens' hidden states with some rows of the weight. Forward and backward make each tile,
reduce it to numbers per token, and drop it; the backward makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from troll.trust_region.kernels import MAX_OUTCOMES
from troll.trust_region.policy.top import BLOCK
from troll.trust_region.policy.values import shape_text
from troll.trust_region.reading.fold import Support, SupportGradient, Tile
from troll.trust_region.reading.source import Part, Pass, Source

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Tokens and vocabulary entries of a tile.
TOKEN_TILE, VOCABULARY_TILE = 4096, 32768

#: Logits of a tile of whole rows, by device: 155 to 311 MB in bf16.
WHOLE_ROWS = {"cpu": 2**25}
WHOLE_ROWS_ON_GPU = 2**27

#: Weights that torch gathers at a time for single logits.
GATHERED = 2**24


@dataclass(frozen=True, eq=False)
class LMHead(Source):
    """Logits of an LM head, ``softcap · tanh(scale · (hidden @ weightᵀ + bias) / softcap) / temperature``.

    The product is computed in the hidden states' dtype, or autocast's where that is on; what follows, and the logits of
    the support, in float32 (float64 for float64). Gradients accumulate in float32.

    Attributes:
        hidden: Hidden states, (..., H), aligned with the tokens.
        weight: (V, H); a process's slice (V/n, H) with `vocab_group`.
        bias: (V,), or None; sliced as the weight is.
        temperature: The sampling temperature.
        scale: Above 0; what the model multiplies its logits by.
        softcap: Above 0, the model's final logit softcap; or None.
        rows: Which rows of (L, H) hidden states are the positions, (N,) integers, all different.
        vocab_group: As in [Logits][troll.Logits]. The gradient of the hidden states is the whole one on every process:
            the backward pass adds up the slices' parts, in float32. So what is passed has to be the hidden states
            themselves. Behind Megatron's ``copy_to_tensor_model_parallel_region``, or a gather of sequence-parallel
            ones with ``tensor_parallel_output_grad=True``, they would be summed a second time: pass what goes into the
            former, and gather with False.
        gathered: Called with weight and bias, and entered around every use of them: for parameters that are sharded
            again before the backward pass.

    Raises:
        ValueError: On tensors that do not fit each other, settings out of their range, or rows that do not fit.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    rows: Tensor | None = None
    vocab_group: ProcessGroup | None = None
    gathered: Callable[[Tensor, Tensor | None], AbstractContextManager[Any]] | None = None

    def __post_init__(self) -> None:
        self.check("hidden", self.hidden, "H")
        if self.weight.dim() != 2 or not len(self.weight) or self.weight.shape[1] != self.hidden.shape[-1]:
            raise ValueError(f"weight must be (V, {self.hidden.shape[-1]}), got {shape_text(self.weight.shape)}")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias must be {shape_text(self.weight.shape[:1])}, got {shape_text(self.bias.shape)}")

    @property
    def width(self) -> int:
        """How many entries of the vocabulary this process holds."""
        return len(self.weight)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.hidden.shape[:-1] if self.rows is None else self.rows.shape

    def with_tensors(self, *tensors: Tensor | None) -> LMHead:
        """See the parent."""
        other = object.__new__(LMHead)  # no checks: None stands in for a tensor
        vars(other).update(vars(self), **dict(zip(("hidden", "weight", "bias"), tensors, strict=True)))
        return other

    @contextmanager
    def opened(self, slots: int, most: int = MAX_OUTCOMES, dtype: torch.dtype | None = None) -> Iterator[Pass]:
        """See the parent."""
        with nullcontext() if self.gathered is None else self.gathered(self.weight, self.bias):
            yield _HeadPass(self, slots, most, dtype or self._product_dtype())

    def _product_dtype(self) -> torch.dtype:
        device = self.hidden.device.type
        autocast = torch.is_autocast_enabled(device) and self.hidden.dtype != torch.float64
        return torch.get_autocast_dtype(device) if autocast else self.hidden.dtype


class _HeadPass(Pass):
    """All tiles lie in the same memory: allocating each would cost as much as its matrix product."""

    def __init__(self, head: LMHead, slots: int, most: int, dtype: torch.dtype) -> None:
        self._memory = head.hidden.new_empty(0, dtype=dtype)
        super().__init__(head, self._memory, slots, most)
        self._head = head
        self._hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
        self._index = None if head.rows is None else head.rows.long()
        self._tokens = head.shape.numel()
        # Of the last tile, in the computing dtype.
        self._hidden_part = self._weight_part = self._memory

    def parts(self, whole_rows: bool = False) -> Iterator[Part]:
        """See the parent."""
        width = self._head.width
        if whole_rows:
            logits = WHOLE_ROWS.get(self._hidden.device.type, WHOLE_ROWS_ON_GPU)
            size = max(1, min(logits // width, TOKEN_TILE)), width
        else:
            size = TOKEN_TILE, VOCABULARY_TILE
        most = [min(length, limit) for length, limit in zip((self._tokens, width), size, strict=True)]
        self._memory = self._hidden.new_empty(most[0] * _whole_blocks(most[1]), dtype=self.dtype)
        for rows in _slices(self._tokens, size[0]):
            at = rows if self._index is None else self._index[rows]
            self._hidden_part = self._hidden[at].to(self.dtype)
            for columns in _slices(width, size[1]):
                product = self._product(columns)
                values = self.transform(product) if self.is_torch else product
                first = self.vocabulary.start + columns.start
                yield Part(rows, columns, Tile(values, first, product.shape[-1], self.transform))

    def _product(self, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        whole = _whole_blocks(width)  # so that rows stay aligned
        rows = len(self._hidden_part)
        product = self._memory[: rows * whole].view(rows, whole)[:, :width]
        self._weight_part = self._head.weight[columns].to(self.dtype)
        torch.mm(self._hidden_part, self._weight_part.t(), out=product)
        if self._head.bias is not None:
            product.add_(self._head.bias[columns].to(self.dtype))
        return product

    def exact(self, ids: Tensor) -> Tensor | None:
        """See the parent: products of half precision, again in float32 for single entries."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            return None
        hidden = (self._hidden if self._index is None else self._hidden[self._index]).to(self.dtype)
        gathered = gathered_products if self.is_torch else self.functions.gathered_products
        products = gathered(hidden, self._head.weight, self._head.bias, ids, self.vocabulary.start)
        logits = self.transform(products)
        # A softcap makes −inf finite.
        return logits if self.transform.softcap is None else logits.masked_fill_(ids < 0, -torch.inf)

    def new_gradients(self, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """See the parent: in float32 (float64)."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        tensors = (self._hidden, self._head.weight, self._head.bias)
        return [
            torch.zeros_like(x, dtype=dtype) if x is not None and needs else None
            for x, needs in zip(tensors, needed, strict=True)
        ]

    def add_gradient(self, sums: list[Tensor | None], part: Part, support: Support, of: SupportGradient) -> None:
        """See the parent."""
        grad = self.functions.gradient(part.tile, support, of).to(self.dtype)
        grad_hidden, grad_weight, grad_bias = sums
        if grad_hidden is not None:
            if self._index is None:
                _add_product(grad_hidden[part.rows], grad, self._weight_part)
            else:
                own = torch.zeros_like(grad_hidden[: len(grad)])
                _add_product(own, grad, self._weight_part)
                grad_hidden.index_add_(0, self._index[part.rows], own)
        if grad_weight is not None:
            _add_product(grad_weight[part.columns], grad.t(), self._hidden_part)
        if grad_bias is not None:
            grad_bias[part.columns] += grad.sum(0, dtype=grad_bias.dtype)

    def finished(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """See the parent: added up over the slices of the vocabulary, in the dtypes of the tensors."""
        if sums[0] is not None:
            self.vocabulary.add_up(sums[0])
            sums[0] = sums[0].view(self._head.hidden.shape)
        return [None if x is None else x.to(y.dtype) for x, y in zip(sums, self._head.tensors, strict=True)]  # type: ignore[union-attr]


def gathered_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, first: int) -> Tensor:
    """``hidden · weight[id] + bias[id]`` in float32, (N, K), of operands that are rounded to the hidden states' dtype.

    Args:
        hidden: (N, H).
        weight: (V, H), in any dtype.
        bias: (V,), or None.
        ids: (N, K); what the weight lacks gets −inf.
        first: The vocabulary entry of the weight's first row.
    """
    step = max(1, GATHERED // max(1, ids.shape[-1] * hidden.shape[-1]))
    here = (ids >= first) & (ids < first + len(weight))
    at = torch.where(here, ids - first, 0)
    with torch.autocast(hidden.device.type, enabled=False):  # it would compute in half precision
        products = [
            torch.bmm(weight[some].to(hidden.dtype).float(), part.float().unsqueeze(-1)).squeeze(-1)
            for part, some in zip(hidden.split(step), at.split(step), strict=True)
        ]
    total = torch.cat(products) if products else hidden.new_empty(ids.shape, dtype=torch.float32)
    total = total if bias is None else total + bias[at].float()
    return total.masked_fill(~here, -torch.inf)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    # In the sum's precision: rounding each tile's product to bf16 first would bias training.
    if total.is_cuda and first.dtype == second.dtype != total.dtype:
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(first.to(total.dtype), second.to(total.dtype))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _whole_blocks(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
