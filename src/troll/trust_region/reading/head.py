"""The logits of an LM head, without ever holding the (tokens x vocabulary) tensor of all of them.

A tile is the product of some tokens' hidden states with some rows of the weight. The forward pass computes each tile,
reduces it to numbers per token, and drops it; the backward pass computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from troll.trust_region.checks import check_shape, shape_text
from troll.trust_region.kernels import MAX_OUTCOMES
from troll.trust_region.policy.top import BLOCK
from troll.trust_region.probabilities import float_dtype
from troll.trust_region.reading.source import LogitsSource, Reading, slices
from troll.trust_region.reading.tiles import Support, Tile, Upstream, rows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Tokens and vocabulary entries of a tile.
TOKEN_TILE, VOCABULARY_TILE = 4096, 32768

#: Logits in a tile of whole rows at most: 67 MB in bf16 on a CPU, 268 MB on a GPU.
WHOLE_ROWS = {"cpu": 2**25, "gpu": 2**27}


@dataclass(frozen=True, eq=False)
class LMHead(LogitsSource):
    """Logits of an LM head, `softcap · tanh(scale · (hidden @ weightᵀ + bias) / softcap) / temperature`.

    The product is computed in the hidden states' dtype, or autocast's if that is on; everything after it, and the
    logits of the support, in float32 (float64 for float64). Gradients accumulate in float32.

    Attributes:
        hidden: The hidden states, (..., H), aligned with the tokens.
        weight: The weight of the head, (V, H); a process's slice (V/n, H) with `vocab_group`.
        bias: The bias of the head, (V,), sliced as the weight is; None for none.
        temperature: The sampling temperature, by which logits are divided.
        scale: The factor by which the model multiplies its logits, above 0.
        softcap: The model's final logit softcap, above 0; None for none.
        rows: The rows of (L, H) hidden states that are the positions, (N,) integers, all different.
        vocab_group: As in [Logits][troll.Logits]. Every process gets the whole gradient of the hidden states: the
            backward pass adds up the slices' parts, in float32. So pass the hidden states themselves. After Megatron's
            `copy_to_tensor_model_parallel_region`, or a gather of sequence-parallel ones with
            `tensor_parallel_output_grad=True`, their gradient would be summed a second time: pass the input of the
            former, and gather with False.
        gathered: Makes a context from weight and bias, which is entered around every use of them: for parameters that
            are sharded again before the backward pass.

    Raises:
        ValueError: If the tensors do not fit each other, settings are out of their range, or rows do not fit.
    """

    tensor_names: ClassVar[tuple[str, ...]] = ("hidden", "weight", "bias")
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
        if self.bias is not None:
            check_shape("bias", self.bias, self.weight.shape[:1])

    @property
    def width(self) -> int:
        """The number of vocabulary entries that this process holds."""
        return len(self.weight)

    @contextmanager
    def reading(self, slots: int, max_slots: int = MAX_OUTCOMES, dtype: torch.dtype | None = None) -> Iterator[Reading]:
        """See the parent."""
        with nullcontext() if self.gathered is None else self.gathered(self.weight, self.bias):
            yield _HeadReading(self, slots, max_slots, dtype or self._product_dtype())

    def _product_dtype(self) -> torch.dtype:
        device = self.hidden.device.type
        autocast = torch.is_autocast_enabled(device) and self.hidden.dtype != torch.float64
        return torch.get_autocast_dtype(device) if autocast else self.hidden.dtype


class _HeadReading(Reading):
    """All tiles lie in the same memory: allocating each would cost as much as its matrix product."""

    def __init__(self, head: LMHead, slots: int, max_slots: int, dtype: torch.dtype) -> None:
        self._memory = head.hidden.new_empty(0, dtype=dtype)
        super().__init__(head, self._memory, slots, max_slots)
        self._head = head
        self._hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
        # The operands of the last tile, in the computing dtype.
        self._hidden_part = self._weight_part = self._memory

    def tiles(self, whole_rows: bool = False) -> Iterator[Tile]:
        """See the parent."""
        width = self._head.width
        most_rows, most_columns = TOKEN_TILE, VOCABULARY_TILE
        if whole_rows:
            logits = WHOLE_ROWS["cpu" if self._hidden.device.type == "cpu" else "gpu"]
            most_rows, most_columns = max(1, min(logits // width, TOKEN_TILE)), width
        size = min(self.tokens, most_rows) * _whole_blocks(min(width, most_columns))
        self._memory = self._hidden.new_empty(size, dtype=self.dtype)
        for rows in slices(self.tokens, most_rows):
            at = rows if self.row_index is None else self.row_index[rows]
            self._hidden_part = self._hidden[at].to(self.dtype)
            for columns in slices(width, most_columns):
                first = self.vocabulary.start + columns.start
                yield self.tile.of_product(self._product(columns), self.transform, first, rows, columns)

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
        """See the parent: computes single products of half precision again in float32."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            return None
        hidden = (self._hidden if self.row_index is None else self._hidden[self.row_index]).to(self.dtype)
        products = self.tile.gathered_products(hidden, self._head.weight, self._head.bias, ids, self.vocabulary.start)
        logits = self.transform(products)
        # A softcap makes −inf finite.
        return logits if self.transform.softcap is None else logits.masked_fill_(ids < 0, -torch.inf)

    def gradients(self, support: Support, upstream: Upstream, needed: Sequence[bool]) -> list[Tensor | None]:
        """See the parent: summed over tiles and slices of the vocabulary in float32 (float64 for float64)."""
        tensors = (self._hidden, self._head.weight, self._head.bias)
        sums = [
            torch.zeros_like(x, dtype=float_dtype(self.dtype)) if x is not None and needs else None
            for x, needs in zip(tensors, needed, strict=True)
        ]
        grad_hidden, grad_weight, grad_bias = sums
        for tile in self.tiles():
            grad = tile.gradient(rows_of(support, tile.rows), rows_of(upstream, tile.rows)).to(self.dtype)
            if grad_hidden is not None:
                if self.row_index is None:
                    _add_product(grad_hidden[tile.rows], grad, self._weight_part)
                else:
                    own = torch.zeros_like(grad_hidden[: len(grad)])
                    _add_product(own, grad, self._weight_part)
                    grad_hidden.index_add_(0, self.row_index[tile.rows], own)
            if grad_weight is not None:
                _add_product(grad_weight[tile.columns], grad.t(), self._hidden_part)
            if grad_bias is not None:
                grad_bias[tile.columns] += grad.sum(0, dtype=grad_bias.dtype)
        if grad_hidden is not None:
            self.vocabulary.add_up(grad_hidden)
            sums[0] = grad_hidden.view(self._head.hidden.shape)
        return [None if x is None else x.to(y.dtype) for x, y in zip(sums, self._head.tensors, strict=True)]  # type: ignore[union-attr]


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    # In the sum's precision, since rounding each tile's product to bf16 first would bias training.
    if total.is_cuda and first.dtype == second.dtype != total.dtype:
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(first.to(total.dtype), second.to(total.dtype))


def _whole_blocks(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
