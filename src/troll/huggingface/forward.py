"""Reading a causal language model inside its forward pass, where FSDP, ZeRO and autocast have its head at hand."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from troll.huggingface.head import opened_head
from troll.trust_region.reading.head import LMHead

#: ``(head of N tokens, their ids (N,)) -> tensors``, of which None stands for one that was not asked for.
Reader = Callable[[LMHead, Tensor], tuple[Tensor | None, ...]]

#: The argument of a model's forward that asks for a reading.
REQUEST = "troll_reading"

#: Set on a model whose forward takes it.
_INSTALLED = "_troll_reads_policies"

#: By how many roundings a model's own logits may differ from those that are read at first: it rounds after the product,
#: after its scale and after each part of a softcap.
_CHECKED_ROUNDINGS = 4

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ReadingRequest:
    """What a forward pass is asked for. DDP and FSDP hand it on as it is: they look into containers, not into this.

    Attributes:
        token_ids: (N,) int64, the tokens that are scored.
        at: Where each stands, (N,) and (N,): its row, and its place among the last T tokens. What predicts it is the
            position before.
        length: T.
        reader: What is read of them.
        temperature: The sampling temperature.
        head_in_float32: Whether the head's product is computed in float32, outside autocast.
    """

    token_ids: Tensor
    at: tuple[Tensor, ...]
    length: int
    reader: Reader
    temperature: float = 1.0
    head_in_float32: bool = False


@dataclass
class ReadingOutput(ModelOutput):
    """What was read. All differentiable results are outputs of the forward, where DDP and FSDP look for them.

    Attributes:
        tensors: Those of the reader, for the N tokens in order.
        vocab_size: V.
        aux_loss: The router's load-balancing loss of a mixture of experts, with ``output_router_logits=True``.
    """

    tensors: tuple[Tensor | None, ...] = ()
    vocab_size: int | None = None
    aux_loss: Tensor | None = None


def forward_and_read(model: nn.Module, request: ReadingRequest, **inputs: Any) -> ReadingOutput:
    """One forward pass of a model, in which its head is read.

    Args:
        model: A causal or vision-language model of transformers, or what PEFT, DDP, FSDP, DeepSpeed or
            ``torch.compile`` made of one. The first call changes its `forward`, which goes on as before without a
            request, and compares the reading with the model's own logits.
        request: Of what.
        **inputs: Of the forward: `input_ids` (B, L), `attention_mask`, images.

    Raises:
        ValueError: If the model's head cannot be read.
        RuntimeError: If the model's logits are not what its head and its configuration say, its forward has been
            replaced, or its outputs are rounded on the way out.
    """
    base = causal_lm(model)
    if not getattr(base, _INSTALLED, False):
        _install(base)
    output = model(**inputs, **{REQUEST: request})
    if not isinstance(output, ReadingOutput):
        raise RuntimeError(
            f"{type(base).__name__}.forward was replaced after its first reading, by something that does not hand on "
            f"{REQUEST}: apply patches to the model before"
        )
    rounded = [x.dtype for x in output.tensors if x is not None and x.dtype in HALF]
    if rounded:
        raise RuntimeError(
            f"the outputs of {type(base).__name__} are rounded to {rounded[0]}, which log-probabilities do not bear: "
            "with FSDP2, set output_dtype=None in its MixedPrecisionPolicy"
        )
    return output


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of PEFT, DDP, FSDP, DeepSpeed and ``torch.compile``.

    Raises:
        ValueError: If there is none, or it has no head.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            raise ValueError(f"model must be a causal language model of transformers, got {type(inner).__name__}")
    if inner.get_output_embeddings() is None or inner.base_model is inner:
        raise ValueError(f"model must have a language-modelling head on a backbone, got {type(inner).__name__}")
    return inner


def _install(model: PreTrainedModel) -> None:
    """Lets a model's forward take a request."""
    plain: Any = model.forward
    # Under accelerate's mixed precision, the forward that is wrapped here enters autocast, and the reading would not.
    mixed = hasattr(model, "_original_forward")
    checked = False

    # The signature stays the model's: `generate` validates its arguments against it. The frame itself is not compiled,
    # as the tiles depend on the data; the backbone, which it calls, is.
    @functools.wraps(type(model).forward)
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        request: ReadingRequest | None = kwargs.pop(REQUEST, None)
        if request is None:
            return plain(*args, **kwargs)
        device = request.token_ids.device.type
        if mixed and not torch.is_autocast_enabled(device):
            raise RuntimeError(
                "the model was prepared with mixed precision: read it within `with accelerator.autocast():`"
            )
        if kwargs.get("labels") is None:  # PEFT passes it on
            kwargs.pop("labels", None)
        if not checked:
            _check_against_logits(self, plain, request, args, kwargs)
            checked = True
        return _read(self, request, args, kwargs)

    model.forward = types.MethodType(forward, model)
    setattr(model, _INSTALLED, True)


def _read(model: Any, request: ReadingRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReadingOutput:
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):  # as the model's own forward does
        kwargs.setdefault("output_router_logits", True)
    outputs = model.base_model(*args, **{**kwargs, "use_cache": False})
    # Aligned at the end: prompt-learning PEFT puts virtual tokens in front.
    hidden = outputs.last_hidden_state[:, -request.length - 1 : -1]
    tensors, vocab_size = _read_head(model, hidden[tuple(x.to(hidden.device) for x in request.at)], request)
    aux_loss: Any = None
    if kwargs.get("output_router_logits"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        aux_loss = load_balancing_loss_func(
            outputs.router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
        )
    return ReadingOutput(tensors=tensors, vocab_size=vocab_size, aux_loss=aux_loss)


@torch.compiler.disable
def _read_head(model: Any, hidden: Tensor, request: ReadingRequest) -> tuple[tuple[Tensor | None, ...], int]:
    """The tensors of the reader for (N, H) hidden states, and V."""
    with opened_head(model, hidden, request.temperature, request.head_in_float32) as head:
        return request.reader(head, request.token_ids.to(head.hidden.device)), head.width


@torch.no_grad()
def _check_against_logits(
    model: Any, plain: Any, request: ReadingRequest, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Compares the head with the logits that the model itself makes of the same hidden states.

    Raises:
        RuntimeError: If they differ: the model does something to its logits that its configuration does not say.
    """
    found: list[Any] = []
    handle = model.base_model.register_forward_hook(lambda module, args, output: found.append(output))
    # Logits of all tokens may not fit into memory.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(plain).parameters else {}
    kwargs = {**kwargs, "use_cache": False}
    devices = [request.token_ids.device] if request.token_ids.is_cuda else []
    try:
        with torch.random.fork_rng(devices):  # dropout is the same below, and in a run without this check
            logits = plain(*args, **kwargs, **last).logits
    finally:
        handle.remove()
    if not found:  # some models call what is inside of their backbone
        with torch.random.fork_rng(devices):
            found.append(model.base_model(*args, **kwargs))
    logits, hidden = logits[:, -1], found[0].last_hidden_state[:, -1]
    with opened_head(model, hidden, 1.0, request.head_in_float32) as head:
        product = nn.functional.linear(head.hidden, head.weight, head.bias)
        own = head.transform(product.to(torch.promote_types(product.dtype, torch.float32)))
    difference, largest = (own - logits.to(own)).abs().max(), logits.abs().max().clamp(min=1)
    # The product of half precision is rounded once; that of float32 is a sum of roundings.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else product.dtype
    roundings = _CHECKED_ROUNDINGS * (1 if dtype in HALF else hidden.shape[-1]) * torch.finfo(dtype).eps
    if bool(logits.isfinite().all()) and not bool(difference <= roundings * largest):
        raise RuntimeError(
            f"the logits of {type(model).__name__} are not those of its head: they differ by {float(difference):.2g}. "
            "It does something to them that its configuration does not say; read its logits with troll.capture and "
            "troll.trust_region_step instead"
        )
