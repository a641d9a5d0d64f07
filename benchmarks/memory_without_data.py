"""Measures the peak memory of a model by running it on tensors that have a shape and a dtype, but no data.

torch's `FakeTensorMode` computes with such tensors, and its `MemTracker` counts the bytes of those that exist at the
same time. Nothing is downloaded, and a model of any size is measured in seconds. `benchmarks.memory` combines the
measurements.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM

import troll
from troll_lab.terminal import one_line

#: Bytes of a quantised weight in bitsandbytes, by its bits: 4 bits have one float32 scale for each 64 weights.
QUANTISED = {4: 0.5 + 4 / 64, 8: 1.0}

#: The methods of `MemTracker` that `_Tracker` needs; some have private names.
_NEEDED = ("_pre_fw_hook", "_post_fw_hook", "_pre_bw_hook", "_post_bw_hook", "track_external", "get_tracker_snapshot")
_MISSING = [name for name in _NEEDED if not hasattr(MemTracker, name)]


class UnknownMemory(RuntimeError):
    """Raised for a model that does not run on tensors without data, and for a torch that cannot count their bytes."""


@dataclass(frozen=True)
class Network:
    """The model of a run.

    Attributes:
        config: Its configuration, a `PreTrainedConfig`.
        dtype: The dtype of its weights.
        peft: The `LoraConfig` of its adapter; None trains all weights.
        bits: 4 or 8 if bitsandbytes quantises the weights below the adapter; else None.
        checkpointing: Whether layers are computed again in the backward pass.
    """

    config: Any = field(hash=False)
    dtype: torch.dtype = torch.float32
    peft: Any | None = field(default=None, hash=False)
    bits: int | None = None
    checkpointing: bool = False


class Parameters(NamedTuple):
    """The number of a network's weights and their bytes, those of gradients and of the optimiser's state.

    `gathered` are the weights that are whole on a GPU at once if the model is sharded: two layers, and those in none.
    """

    numbers: int
    weights: int
    gradients: int
    optimiser: float
    gathered: int


class Batch(NamedTuple):
    """The shape of a batch, whose rows have full length in tokens, and how it is computed."""

    rows: int
    prompt: int
    completion: int
    autocast: torch.dtype | None = None

    def casting(self) -> torch.autocast:
        """The context in which a run calls the model."""
        return torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None)


@functools.cache
def parameters(network: Network, optimiser: str = "adamw_torch") -> Parameters:
    """Counts a network's weights, and what an optimiser, by its name in transformers, keeps for them."""
    with _without_data(network) as model:
        base, head = _base(model), _base(model).get_output_embeddings()
        names = set(base._no_split_modules or ())  # the layers that FSDP gathers one by one
        layers = [sum(map(Tensor.numel, m.parameters())) for m in base.modules() if type(m).__name__ in names]
        weights = sum(p.nbytes for p in model.parameters())
        for module in base.modules() if network.bits else ():  # linear layers are quantised, but not the LM head
            if type(module) is nn.Linear and not module.weight.requires_grad and module is not head:
                weights += int(module.weight.numel() * QUANTISED[network.bits or 8]) - module.weight.nbytes
        numbers, trained = sum(map(Tensor.numel, model.parameters())), _trained(model)
        gathered = numbers - sum(layers) + 2 * max(layers, default=0)
        return Parameters(
            numbers, weights, sum(p.nbytes for p in trained), optimiser_bytes(optimiser, trained), gathered
        )


def optimiser_bytes(name: str, trained: list[Tensor]) -> float:
    """The bytes of an optimiser's state: AdamW's for one of an unknown name, as no usual optimiser keeps more."""
    if name == "adafactor":  # keeps one number for each row and column of a matrix
        return 4.0 * sum(sum(p.shape) if p.dim() == 2 else p.numel() for p in trained)
    moments = 0 if name == "sgd" else 1 if any(kind in name for kind in ("lion", "rmsprop", "adagrad")) else 2
    quantised = {"8bit": 1.0, "4bit": 0.5}.get(name.rpartition("_")[2])
    return moments * sum(p.numel() * (quantised or p.element_size()) for p in trained)


@functools.cache
def update(network: Network, batch: Batch, top_k: int, accumulates: bool) -> int:
    """The bytes beyond weights and gradients of forward and backward; `accumulates` where gradients exist already."""
    with _without_data(network, training=True) as model:
        for parameter in _trained(model) if accumulates else ():
            parameter.grad = torch.zeros_like(parameter)
        with (tracker := _Tracker(model)):
            with batch.casting():
                head = troll.LMHead(_hidden(model, batch), _base(model).get_output_embeddings().weight)
                ids = torch.zeros(len(head.hidden), top_k, dtype=torch.long)
                old = troll.capture_top(ids, 1.0 * ids, ids[:, 0], 1.0 * ids[:, 0], head.width, top_k=top_k)
                step = troll.trust_region_step(head, old)
            (step.log_ratio.exp() + step.regression).mean().backward()
        return max(0, tracker.peak - (0 if accumulates else sum(p.nbytes for p in _trained(model))))


@functools.cache
def score(network: Network, batch: Batch, top_k: int | None) -> int:
    """The bytes beyond the weights of a pass without gradient; None for `top_k` where it captures no old policies."""
    with _without_data(network) as model:
        with (tracker := _Tracker(model)), torch.no_grad(), batch.casting():
            hidden = _hidden(model, batch)
            if top_k is not None:
                head = troll.LMHead(hidden, _base(model).get_output_embeddings().weight)
                troll.capture(head, torch.zeros(len(hidden), dtype=torch.long), top_k=top_k)
        return tracker.peak


def generation(network: Network, batch: Batch) -> tuple[int, int]:
    """The bytes of one call of transformers' `generate`: the keys and values, and the rest beyond the weights.

    Keys have the dtype of the weights, and values that of the products. The rest is the pass over the prompts; or that
    of the last token, with three times its logits, and a layer's keys and values, which are copied to add the token.
    """
    text, tokens = network.config.get_text_config(), batch.prompt + batch.completion
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    row = heads * width * (network.dtype.itemsize + (batch.autocast or network.dtype).itemsize) * text.num_hidden_layers
    # Memory grows linearly with the rows, so that two measurements serve for all sizes of a call.
    one, two = (score(network, batch._replace(rows=rows, completion=0), None) for rows in (1, 2))
    prompts = one + (batch.rows - 1) * (two - one) - batch.rows * row * batch.completion
    last = 2 * one - two + batch.rows * (row * tokens // text.num_hidden_layers + 12 * text.vocab_size)
    return batch.rows * row * tokens, max(prompts, last)


class _Tracker(MemTracker):
    """torch's tracker, without its statistics of every module, which take most of its time."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = None  # type: ignore[assignment]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.track_external(model)
        self._known = self._total("current")  # the model's weights and gradients

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at one time."""
        return self._total("peak") - self._known

    def _total(self, kind: str) -> int:
        return sum(snapshot["Total"] for snapshot in self.get_tracker_snapshot(kind).values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # `if wrong.any(): raise`
        return super().__torch_dispatch__(_LARGEST.get(function, function), types, args, kwargs)


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of the experts' products in any dtype: without data, torch knows it only in bf16."""
    groups = () if first.dim() + second.dim() == 5 or offs is None else (len(offs),)
    return first.new_empty(*groups, first.shape[-2], second.shape[-1])


#: Operators whose shape is not known without data, and others that give the largest one.
_LARGEST = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.dim(), dtype=torch.long),
}


@contextmanager
def _without_data(network: Network, training: bool = False) -> Iterator[Any]:
    """A context with the model, in which all new tensors have a shape and a dtype, but no data."""
    try:
        if _MISSING:
            raise AttributeError(f"the MemTracker of torch {torch.__version__} has no {_MISSING[0]}")
        with warnings.catch_warnings(action="ignore"):
            model = _on_meta(network, training)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")
                _base(model).tie_weights()
                yield model
    except Exception as error:  # the code of an architecture may raise anything
        raise UnknownMemory(
            f"the memory of a {network.config.model_type} model cannot be estimated: {one_line(error, 200)}"
        ) from error


def _on_meta(network: Network, training: bool) -> Any:
    build = getattr(transformers, (network.config.architectures or [""])[0], AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        model = build(copy.deepcopy(network.config)).to(network.dtype).train(training)
        if training and network.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if network.peft is not None:
            model = get_peft_model(model, copy.deepcopy(network.peft))
    return model


def _trained(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _base(model: Any) -> Any:
    """The model below its adapter, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _hidden(model: Any, batch: Batch) -> Tensor:
    """The hidden states that predict the completions' tokens."""
    ids = torch.ones(batch.rows, batch.prompt + batch.completion, dtype=torch.long)
    output = _base(model).get_decoder()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return output.last_hidden_state[:, -batch.completion - 1 : -1].flatten(0, 1)
