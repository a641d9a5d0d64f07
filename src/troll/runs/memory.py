"""The peak memory of a model: it runs on tensors without data, whose bytes are counted.

Nothing is downloaded and nothing computed, so a model of any size is measured in seconds, on any machine. Each function
measures one thing that a run does with one model; `troll.runs.plan` combines them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll.runs.without_data import Network, base_of, without_data
from troll.trust_region.policy.top import BLOCK
from troll.trust_region.reading.head import GATHERED, TOKEN_TILE, VOCABULARY_TILE, WHOLE_ROWS, WHOLE_ROWS_ON_GPU

#: Bytes of a quantised weight in bitsandbytes, by its bits: 4 bits have one float32 scale for each 64 weights.
QUANTISED = {4: 0.5 + 4 / 64, 8: 1.0}

#: Bytes of a step for each token and slot of a support; and bytes of finding the top K for each sorted logit, if these
#: are the K blocks with the largest maxima, or a whole row with few blocks.
STEP_SLOT, SORTED_OF_BLOCKS, SORTED = 50, 36, 24

#: Tokens and vocabulary entries of a tile of TRL's own fused head, which reads the reference. It takes whole tiles even
#: of a smaller vocabulary, and on a CPU three float32 copies of the part that is used.
REFERENCE_TOKENS, REFERENCE_VOCABULARY, REFERENCE_COPIES = 4096, 32768, 3


class Parameters(NamedTuple):
    """Bytes of a network's weights."""

    weights: int
    """All weights, adapters included."""
    trained: int
    """The weights with a gradient, which has the same size."""
    numbers: int
    """The number of weights, as numbers instead of bytes."""
    trained_numbers: int
    """The number of trained ones."""
    factored: int
    """The numbers that Adafactor keeps: one for each row and column of the trained matrices, and all others."""
    gathered: int
    """The numbers that are whole on a GPU at once if the model is sharded: two layers, and those in no layer."""


class Update(NamedTuple):
    """Bytes of forward and backward of one micro-batch, at their peak."""

    activations: int
    """The peak beyond weights and gradients, without the LM head, with everything that is cast and added up."""
    head: int
    """The LM head's addition to the peak."""


class Generation(NamedTuple):
    """Bytes of one call of transformers' `generate`, at its peak."""

    cache: int
    """The keys and values of all tokens."""
    activations: int
    """The rest without the weights: the largest pass, autocast's copies, and the logits of the next token."""


class Micro(NamedTuple):
    """The shape of a batch, and how it is computed."""

    rows: int
    prompt: int
    """Tokens."""
    completion: int
    """Tokens."""
    autocast: torch.dtype | None
    on_gpu: bool


@functools.cache
def parameters(network: Network) -> Parameters:
    """Counts a network's weights."""
    with without_data(network) as model:
        base = base_of(model)
        weights = sum(_bytes(p) for p in model.parameters())
        if network.bits:
            weights -= sum(_bytes(m.weight) - int(m.weight.numel() * QUANTISED[network.bits]) for m in _quantised(base))
        trained = [p for p in model.parameters() if p.requires_grad]
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(base)]
        total = sum(p.numel() for p in model.parameters())
        return Parameters(
            weights=weights,
            trained=sum(map(_bytes, trained)),
            numbers=total,
            trained_numbers=sum(p.numel() for p in trained),
            factored=sum(sum(p.shape) if p.dim() == 2 else p.numel() for p in trained),
            gathered=total - sum(layers) + 2 * max(layers, default=0),
        )


@functools.cache
def update(network: Network, batch: Micro, top_k: int, accumulates: bool, with_head: bool = True) -> Update:
    """Measures forward and backward of one micro-batch.

    Args:
        network: The model that is trained.
        batch: The shape of the micro-batch, with rows of full length.
        top_k: K of the old policy.
        accumulates: Whether gradients of an earlier micro-batch exist already.
        with_head: Whether the completions are read through the fused LM head; a critic has none.
    """
    with without_data(network, training=True) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        decoder, head = base_of(model).get_decoder(), base_of(model).get_output_embeddings()
        gradients = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
        if accumulates:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        ledger = _Ledger(tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None)
        with ledger:
            with _autocast(batch.autocast):
                hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                scored = hidden[:, -batch.completion - 1 : -1].flatten(0, 1)
                if with_head:
                    dtype, (vocabulary, width) = batch.autocast or scored.dtype, head.weight.shape
                    scratch = head_scratch(len(scored), vocabulary, width, top_k, dtype.itemsize, batch.on_gpu)
                    loss = _Head.apply(ledger, scratch, scored, head.weight)
                else:
                    loss = scored.float().sum()
            del hidden, scored
            loss.backward()
        there = 0 if accumulates else gradients
        activations = max(0, ledger.peak_without_head - there) + _dequantised(network, model)
        return Update(activations, max(ledger.peak, there) - max(ledger.peak_without_head, there))


@functools.cache
def capture(network: Network, batch: Micro, top_k: int, reference: bool = False) -> int:
    """Measures the pass without gradient that captures the old policy of one micro-batch, in bytes beyond the weights.

    Args:
        network: The policy's model.
        batch: The shape of the micro-batch, with rows of full length.
        top_k: K of the old policy.
        reference: Whether a reference makes the same pass too, which TRL's own head reads.
    """
    with without_data(network) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        vocabulary = base_of(model).get_output_embeddings().weight.shape[0]
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad(), _autocast(batch.autocast):
            hidden = base_of(model).get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            dtype = batch.autocast or hidden.dtype
            most = WHOLE_ROWS_ON_GPU if batch.on_gpu else WHOLE_ROWS["cpu"]
            tokens = max(1, min(batch.rows * batch.completion, most // vocabulary, TOKEN_TILE))
            tile = tokens * vocabulary * (dtype.itemsize if batch.on_gpu else dtype.itemsize % 4 + 4)
            _touch(tile + tokens * _top_bytes(vocabulary, top_k))
            if reference:
                _touch(_reference_scratch(batch, vocabulary, dtype.itemsize))
        return ledger.peak + _dequantised(network, model)


@functools.cache
def generation(network: Network, batch: Micro) -> Generation:
    """Measures transformers' `generate` for rows that all end at full length.

    Args:
        network: The policy.
        batch: The shape of one call.
    """
    with without_data(network) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        base = base_of(model)
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad():
            # All but the last token at once: the size of such a cache does not depend on how it was filled.
            with _autocast(batch.autocast):
                cache = base(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            full = ledger.now
            ledger.forget_peak()
            with _autocast(batch.autocast):
                output = base(ids[:, -1:], attention_mask=mask, past_key_values=cache, logits_to_keep=1)
            logits = output.logits.float()
            scores = logits[:, -1].to(torch.float32, copy=True)
            chosen = scores.softmax(-1)
            _touch(_bytes(chosen))  # inside torch.multinomial
            last = ledger.peak - full
            del cache, output, logits, scores, chosen
            ledger.forget_peak()
            with _autocast(batch.autocast):
                base(ids[:, : batch.prompt], attention_mask=mask[:, : batch.prompt], use_cache=True, logits_to_keep=1)
        first = ledger.peak
        return Generation(full, max(last, first - full, 0) + _dequantised(network, model))


@functools.cache
def forward(network: Network, rows: int, tokens: int) -> int:
    """Measures one forward pass without gradient, as of a reward model on a rollout, in bytes beyond the weights.

    Args:
        network: A sequence classifier.
        rows: The rows of the call.
        tokens: The tokens of each row.
    """
    with without_data(network) as model:
        ids, mask = _inputs(rows, tokens)
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad():
            # Without its head, which gives one number a token: which of them counts depends on data.
            output = base_of(model).base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        del output
        return ledger.peak


def head_scratch(tokens: int, vocabulary: int, width: int, top_k: int, itemsize: int, on_gpu: bool) -> tuple[int, int]:
    """The memory of the fused LM head for its tiles, without the sums of its gradients.

    Args:
        tokens: The tokens that are scored in a micro-batch.
        vocabulary: V, the tokens in the vocabulary.
        width: H, the width of the hidden states.
        top_k: K of the old policy.
        itemsize: The bytes of a number of the products: 2 or 4.
        on_gpu: Whether Triton's kernels work on the tiles; on a CPU, torch makes float32 copies.

    Returns:
        The bytes in the forward and in the backward pass.
    """
    logits = min(tokens, TOKEN_TILE) * min(vocabulary, VOCABULARY_TILE)
    part = min(vocabulary, VOCABULARY_TILE) * width
    step = tokens * (top_k + 1) * STEP_SLOT
    if itemsize == 4:
        return 4 * logits + step, 4 * logits + step
    product = 2 * (logits + part) + step
    if on_gpu:
        return product, product
    copies = (8 if vocabulary > VOCABULARY_TILE else 4) * logits
    gathered = 6 * min(tokens * top_k * width, GATHERED)  # the support's logits, again in float32
    return product + max(copies, gathered), product + 10 * logits + 4 * part


def _reference_scratch(batch: Micro, vocabulary: int, itemsize: int) -> int:
    # Without Triton, TRL scores the prompts too.
    tokens = min(batch.rows * (batch.completion + (0 if batch.on_gpu else batch.prompt)), REFERENCE_TOKENS)
    copies = 0 if batch.on_gpu else REFERENCE_COPIES + (itemsize < 4)
    return tokens * (REFERENCE_VOCABULARY * itemsize + 4 * copies * min(vocabulary, REFERENCE_VOCABULARY))


def _top_bytes(vocabulary: int, top_k: int) -> int:
    """The bytes of finding the K largest logits of one token."""
    if vocabulary // BLOCK > 2 * top_k:
        return top_k * BLOCK * SORTED_OF_BLOCKS
    return vocabulary * SORTED


class _Ledger(TorchDispatchMode):
    """Counts the bytes of all living tensors, except for those that are known from the start."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.head = self.peak_without_head = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default:
            output = _grouped_product(*args, **(kwargs or {}))
        else:
            output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def forget_peak(self) -> None:
        """Starts again from the tensors that live now."""
        self.peak = self.peak_without_head = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.peak_without_head = max(self.peak_without_head, self.now - self.head)

        def freed() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of the experts' products in any dtype: without data, torch knows it only in bf16."""
    groups = () if first.dim() + second.dim() == 5 or offs is None else (len(offs),)
    return first.new_empty(*groups, first.shape[-2], second.shape[-1])


class _Head(torch.autograd.Function):
    """Takes the memory of the fused LM head: tiles in both passes, and float32 sums of gradients in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, ledger: _Ledger, scratch: tuple[int, int], hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.ledger, ctx.scratch = ledger, scratch[1]  # type: ignore[attr-defined]
        ledger.head = scratch[0]
        _touch(scratch[0])
        ledger.head = 0
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        sums = [
            torch.zeros_like(x, dtype=torch.float32) if needs else None
            for x, needs in zip((hidden, weight), needed, strict=True)
        ]
        ctx.ledger.head = ctx.scratch
        _touch(ctx.scratch)
        ctx.ledger.head = 0
        return None, None, *(None if x is None else x.to(y.dtype) for x, y in zip(sums, (hidden, weight), strict=True))


def _touch(size: int) -> None:
    """Allocates this many bytes for a moment."""
    torch.empty(size, dtype=torch.uint8)


def _inputs(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask, with padding as in real batches."""
    ids = torch.ones(rows, tokens, dtype=torch.long)
    return ids, torch.ones_like(ids)


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _layers(base: Any) -> list[nn.Module]:
    """The layers that FSDP gathers one by one."""
    names = set(base._no_split_modules or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def _quantised(base: Any) -> list[Any]:
    """The layers that bitsandbytes quantises: linear ones, but not the LM head."""
    head = base.get_output_embeddings()
    linear = [module for module in base.modules() if type(module) is nn.Linear]
    return [module for module in linear if module is not head and module.weight.requires_grad is False]


def _dequantised(network: Network, model: Any) -> int:
    """The bytes of the largest quantised layer, which is dequantised while it computes."""
    return max((_bytes(m.weight) for m in _quantised(base_of(model))), default=0) if network.bits else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
