"""What a model takes at its peak: it is run on tensors without data, whose bytes are counted.

Nothing is downloaded and nothing computed, so a model of any size is measured in seconds, on any machine. Each function
here looks at one thing that a run does with one model; `troll.study.plan` puts them together.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll.terminal import one_line
from troll.trust_region.policy.top import BLOCK
from troll.trust_region.reading.head import GATHERED, TOKEN_TILE, VOCABULARY_TILE, WHOLE_ROWS, WHOLE_ROWS_ON_GPU

#: Bytes of a weight that bitsandbytes quantises, with its scales: one float32 for each 64 weights of 4 bits.
QUANTISED = {4: 0.5 + 4 / 64, 8: 1.0}

#: Bytes that a step holds for each token and slot of a support, and that the top K takes for each logit that is sorted:
#: those of the K blocks with the largest maxima, or the whole row where it has few blocks.
STEP_SLOT, SORTED_OF_BLOCKS, SORTED = 50, 36, 24

#: Tokens and vocabulary entries of a tile of TRL's own fused head, which reads the reference; it takes whole tiles also
#: of a smaller vocabulary, and on a CPU three float32 copies of what is used of them.
REFERENCE_TOKENS, REFERENCE_VOCABULARY, REFERENCE_COPIES = 4096, 32768, 3


class UnknownMemory(RuntimeError):
    """A model that does not run on tensors without data."""


@dataclass(frozen=True, eq=False)
class Network:
    """A model as a run loads it. Compared by identity, so that what was measured of it is kept.

    Attributes:
        config: Its configuration, a `PreTrainedConfig`.
        dtype: Of its weights.
        peft: The `LoraConfig` of its adapter; None trains all weights.
        bits: 4 or 8 where bitsandbytes quantises the weights below the adapter.
        checkpointing: Whether layers are computed again in the backward pass.
        trust_remote_code: Whether an architecture that transformers lacks may be run from its own files.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    peft: Any | None = None
    bits: int | None = None
    checkpointing: bool = False
    trust_remote_code: bool = False


class Parameters(NamedTuple):
    """Bytes of a network's weights."""

    weights: int
    """All of them, adapters included."""
    trained: int
    """Those with a gradient, which has the same size."""
    numbers: int
    """How many numbers there are."""
    trained_numbers: int
    """How many of them are trained."""
    factored: int
    """Rows and columns of the trained matrices, of which Adafactor keeps one number each; and all other numbers."""
    gathered: int
    """How many numbers are whole on a GPU at once where the model is sharded: what is in no layer, and two layers."""


class Update(NamedTuple):
    """Bytes of forward and backward of one micro-batch, at their peak."""

    activations: int
    """Beyond weights and gradients, without the LM head's; what is cast and added up meanwhile included."""
    head: int
    """What the LM head adds to the peak."""


class Generation(NamedTuple):
    """Bytes of one call of transformers' `generate`, at its peak."""

    cache: int
    """Keys and values of all tokens."""
    activations: int
    """The rest, beyond the weights: the largest pass, autocast's copies, and the logits of the next token."""


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
    with _without_data(network) as model:
        base = _base(model)
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
        network: What is trained.
        batch: Its rows, all of full length.
        top_k: K of the old policy.
        accumulates: Whether gradients of an earlier micro-batch are there already.
        with_head: Whether the completions are read through the fused LM head; a critic has none.
    """
    with _without_data(network, training=True) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        decoder, head = _base(model).get_decoder(), _base(model).get_output_embeddings()
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
                    dtype = batch.autocast or scored.dtype
                    scratch = head_scratch(len(scored), *_sizes(head), top_k, dtype.itemsize, batch.on_gpu)
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
        network: The policy.
        batch: Its rows, all of full length.
        top_k: K of the old policy.
        reference: Whether the same pass is made of a reference too, which TRL's own head reads.
    """
    with _without_data(network) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        vocabulary = _base(model).get_output_embeddings().weight.shape[0]
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad(), _autocast(batch.autocast):
            hidden = _base(model).get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
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
        batch: What is generated in one call.
    """
    with _without_data(network) as model:
        ids, mask = _inputs(batch.rows, batch.prompt + batch.completion)
        base = _base(model)
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad():
            # All but the last token at once: what such a cache holds does not depend on how it was filled.
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
        rows: In one call.
        tokens: Of each row.
    """
    with _without_data(network) as model:
        ids, mask = _inputs(rows, tokens)
        ledger = _Ledger(model.parameters())
        with ledger, torch.no_grad():
            # Without its head, one number a token: which of them counts depends on data.
            output = _base(model).base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        del output
        return ledger.peak


def head_scratch(tokens: int, vocabulary: int, width: int, top_k: int, itemsize: int, on_gpu: bool) -> tuple[int, int]:
    """What the fused LM head holds for its tiles, without the sums of its gradients.

    Args:
        tokens: That are scored in a micro-batch.
        vocabulary: V
        width: H
        top_k: K
        itemsize: Bytes of a number of the products: 2 or 4.
        on_gpu: Whether Triton's kernels work on the tiles; on a CPU, torch makes float32 copies.

    Returns:
        Bytes in the forward and in the backward pass.
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
    """What finding the K largest logits of one token holds."""
    if vocabulary // BLOCK > 2 * top_k:
        return top_k * BLOCK * SORTED_OF_BLOCKS
    return vocabulary * SORTED


class _Ledger(TorchDispatchMode):
    """Counts the bytes of all tensors that live, but for those that are known from the start."""

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
        """Starts again from what lives now."""
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
    """The shape of the experts' products in any dtype: without data, torch knows those in bf16 only."""
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
    """Allocates so many bytes for a moment."""
    torch.empty(size, dtype=torch.uint8)


@contextmanager
def _without_data(network: Network, training: bool = False) -> Iterator[Any]:
    """The model; all tensors that are made meanwhile have a shape and a dtype, but no data."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            model = _on_meta(network, training)
            with FakeTensorMode():
                yield _filled(model)
    except Exception as error:  # of any architecture's own code
        raise UnknownMemory(
            f"the memory of a {network.config.model_type} model cannot be estimated, because it does not run on "
            f"tensors without data: {one_line(error, 200)}"
        ) from error


def _on_meta(network: Network, training: bool) -> Any:
    config, before = copy.deepcopy(network.config), torch.get_default_dtype()
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    try:
        torch.set_default_dtype(network.dtype)
        with torch.device("meta"):
            if architecture is None:
                auto = transformers.AutoModelForCausalLM
                model = auto.from_config(config, dtype=network.dtype, trust_remote_code=network.trust_remote_code)
            else:
                model = architecture(config)
    finally:
        torch.set_default_dtype(before)
    model.train(training)
    checkpointing = training and network.checkpointing
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if network.peft is None:
        return model
    if checkpointing:
        model.enable_input_require_grads()
    with torch.device("meta"):
        adapted = get_peft_model(model, copy.deepcopy(network.peft))
    if network.bits:  # TRL casts these adapters
        for parameter in adapted.parameters():
            parameter.data = parameter.data.to(torch.bfloat16) if parameter.requires_grad else parameter.data
    return adapted


def _filled(model: Any) -> Any:
    """Puts a tensor of a CPU in the place of every one on the meta device, where autocast would do nothing."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:  # tied weights stay tied
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[id(old)]
    return model


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _inputs(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask, with padding as batches have it."""
    ids = torch.ones(rows, tokens, dtype=torch.long)
    return ids, torch.ones_like(ids)


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _layers(base: Any) -> list[nn.Module]:
    """What FSDP gathers apart."""
    names = set(base._no_split_modules or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def _quantised(base: Any) -> list[Any]:
    """The layers that bitsandbytes takes: linear ones, but not the LM head."""
    head = base.get_output_embeddings()
    linear = [module for module in base.modules() if type(module) is nn.Linear]
    return [module for module in linear if module is not head and module.weight.requires_grad is False]


def _dequantised(network: Network, model: Any) -> int:
    """The largest quantised layer is there in full while it computes."""
    return max((_bytes(m.weight) for m in _quantised(_base(model))), default=0) if network.bits else 0


def _sizes(head: Any) -> tuple[int, int]:
    vocabulary, width = head.weight.shape
    return vocabulary, width


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
