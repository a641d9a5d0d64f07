"""The logits of an LM head, without the (tokens x vocabulary) tensor of all logits.

A tile is the product of some tokens' hidden states with some rows of the weight. The forward pass computes each tile
and reduces it to numbers per token. The backward pass computes it again, unless it was kept: see `KEPT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_shape, shape_text
from ..kernels import switched_on
from ..policy.top import BLOCK
from ..probabilities import as_float, float_dtype
from .source import LogitsSource, Reading, slices
from .tiles import Support, Tile, Upstream, rows_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The most tokens and vocabulary entries of a tile. Where one tile has all tokens, its product with the hidden states
#: is the whole gradient of its rows of the weight: nothing is summed up over tiles.
TOKEN_TILE, VOCABULARY_TILE = 32768, 32768

#: The most logits of a tile, and of a tile of whole rows, by device: 268 MB in bf16, 67 MB for whole rows on a CPU.
#: Other tiles are a power of two wide, but for the last, since kernels are compiled and tuned for each width.
TILE_LOGITS = 2**27
WHOLE_ROWS = {"cpu": 2**25, "gpu": 2**27}

#: Bytes of tiles that the forward pass keeps for the backward pass, for each number of a weight that is trained: as
#: much as a sum of its gradient in float32, which only more than `TOKEN_TILE` tokens need. For a weight in float32 they
#: come on top of the gradient. They live as long as autograd's graph, and hooks for saved tensors do not see them.
KEPT = 4

#: The environment variable with which 0 keeps no tiles: less memory, and every tile is computed twice.
KEEP_TILES_VARIABLE = "TROLL_KEEP_TILES"


@dataclass(frozen=True, eq=False)
class LMHead(LogitsSource):
    """Logits of an LM head, `softcap · tanh(scale · (hidden @ weightᵀ + bias) / softcap) / temperature`.

    The product is computed in the hidden states' dtype, or autocast's if that is on; everything after it, and the
    logits of the support, in float32 (float64 for float64). Gradients of tiles are added up in float32.

    Attributes:
        hidden: The hidden states, (..., H), aligned with the tokens.
        weight: The weight of the head, (V, H); a process's slice (V/n, H) with `vocab_group`.
        bias: The bias of the head, (V,), sliced as the weight is; None for none.
        temperature: The sampling temperature, which divides the logits.
        scale: The factor of the model's logits, above 0.
        softcap: The model's final logit softcap, above 0; None for none.
        rows: The rows of (L, H) hidden states to use as token positions, (N,) integers, all different; None for all.
        vocab_group: The processes over which the vocabulary is spread, see [Logits][troll.Logits]. Every process gets
            the whole gradient of the hidden states: the backward pass adds up the slices' parts, in float32. So pass
            the hidden states themselves. After Megatron's `copy_to_tensor_model_parallel_region`, or a gather of
            sequence-parallel ones with `tensor_parallel_output_grad=True`, their gradient would be summed a second
            time: pass the input of the former, and gather with False.
        gathered: A function of weight and bias that returns a context manager, which is entered around every use of
            them: for parameters that are sharded again before the backward pass.

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
    def reading(self, tile: type[Tile], dtype: torch.dtype | None = None) -> Iterator[Reading]:
        """See the parent."""
        with nullcontext() if self.gathered is None else self.gathered(self.weight, self.bias):
            yield _HeadReading(self, tile, dtype or self._product_dtype())

    def _product_dtype(self) -> torch.dtype:
        device = self.hidden.device.type
        autocast = torch.is_autocast_enabled(device) and self.hidden.dtype != torch.float64
        return torch.get_autocast_dtype(device) if autocast else self.hidden.dtype


class _HeadReading(Reading):
    """Tiles that are not kept lie in the same memory: allocating each would cost as much as its matrix product."""

    def __init__(self, head: LMHead, tile: type[Tile], dtype: torch.dtype) -> None:
        super().__init__(head, tile, dtype)
        self._head = head
        self._memory = head.hidden.new_empty(0, dtype=dtype)
        self._hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
        self._room = -1  # bytes of tiles that may still be kept

    def keep(self, needed: Sequence[bool]) -> None:
        """See the parent."""
        # Torch's operations overwrite a tile.
        if switched_on(KEEP_TILES_VARIABLE) and needed[1] and not self.tile.copies and self.tokens <= TOKEN_TILE:
            self._room = KEPT * self._head.weight.numel()

    def tiles(self, whole_rows: bool = False) -> Iterator[Tile]:
        """See the parent."""
        return (tile for tile, _, _ in self._products(whole_rows))

    def _products(self, whole_rows: bool = False) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """The tiles, and of each the hidden states and the rows of the weight whose product it is, in `dtype`."""
        width, most_rows = self._head.width, max(1, min(self.tokens, TOKEN_TILE))
        most_columns = min(VOCABULARY_TILE, 1 << (TILE_LOGITS // most_rows).bit_length() - 1)
        if whole_rows:
            logits = WHOLE_ROWS["cpu" if self._hidden.device.type == "cpu" else "gpu"]
            most_rows, most_columns = max(1, min(logits // width, most_rows)), width
        kept, self.kept = self.kept, []
        for rows in slices(self.tokens, most_rows):
            at = rows if self.row_index is None else self.row_index[rows]
            hidden = self._hidden[at].to(self.dtype)
            for columns in slices(width, most_columns):
                weight = self._head.weight[columns].to(self.dtype)
                product = kept.pop(0) if kept else self._product(hidden, weight, columns)
                first = self.vocabulary.start + columns.start
                yield self.tile.of_product(product, self.transform, first, rows, columns), hidden, weight

    def _product(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        product = self._empty(len(hidden), len(weight))
        torch.mm(hidden, weight.t(), out=product)
        if self._head.bias is not None:
            product.add_(self._head.bias[columns].to(self.dtype))
        return product

    def _empty(self, rows: int, width: int) -> Tensor:
        pitch = -(-width // BLOCK) * BLOCK  # so that rows stay aligned
        size = rows * pitch
        keeps = (bytes_needed := size * self.dtype.itemsize) <= self._room
        # After one that does not fit none is kept, even if it is smaller: the kept ones are the first.
        self._room = self._room - bytes_needed if keeps else -1
        if keeps or len(self._memory) < size:
            self._memory = self._hidden.new_empty(size, dtype=self.dtype)
        product = self._memory[:size].view(rows, pitch)[:, :width]
        if keeps:
            self.kept.append(product)
            self._memory = self._memory[:0]
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
        """See the parent: sums over tiles or slices of the vocabulary are in float32 (float64 for float64)."""
        weight, bias, precise = self._head.weight, self._head.bias, float_dtype(self.dtype)
        summed = self.tokens > TOKEN_TILE
        grad_hidden = grad_weight = grad_bias = None
        if needed[0]:
            grad_hidden = self._hidden.new_zeros((self.tokens, self._hidden.shape[-1]), dtype=precise)
        if needed[1]:
            grad_weight = torch.zeros_like(weight, dtype=precise) if summed else torch.empty_like(weight)
        if needed[2] and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=precise)
        for tile, hidden_part, weight_part in self._products():
            grad = tile.gradient(rows_of(support, tile.rows), rows_of(upstream, tile.rows)).to(self.dtype)
            if grad_hidden is not None:
                _product_into(grad_hidden[tile.rows], grad, weight_part, add=True)
            if grad_weight is not None:
                _product_into(grad_weight[tile.columns], grad.t(), hidden_part, add=summed)
            if grad_bias is not None:
                grad_bias[tile.columns] += grad.sum(0, dtype=grad_bias.dtype)
        if grad_hidden is not None:
            self.vocabulary.add_up(grad_hidden)
            grad_hidden = self._at_positions(grad_hidden.to(self._hidden.dtype))
        return [
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        ]

    def _at_positions(self, grad_hidden: Tensor) -> Tensor:
        """The gradient of all hidden states from that of the positions, (N, H)."""
        if self.row_index is not None:
            grad_hidden = torch.zeros_like(self._hidden).index_copy_(0, self.row_index, grad_hidden)
        return grad_hidden.view(self._head.hidden.shape)


def _product_into(out: Tensor, first: Tensor, second: Tensor, *, add: bool) -> None:
    """Writes a product, or adds it to a sum in float32 or float64: rounding each summand first would bias training."""
    options: dict[str, Any] = {}
    if first.dtype != out.dtype:
        # The only product with another dtype than its operands, and on CUDA only.
        if out.is_cuda and out.dtype == torch.float32 and first.dtype.itemsize == 2:
            options = {"out_dtype": out.dtype}
        else:
            first, second = as_float(first), as_float(second)
    if add:
        torch.addmm(out, first, second, **options, out=out)
    elif first.dtype == out.dtype or options:
        torch.mm(first, second, **options, out=out)
    else:
        out.copy_(first @ second)
