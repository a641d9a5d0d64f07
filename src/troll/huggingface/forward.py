"""Reads a causal language model inside its forward pass, where FSDP and ZeRO have gathered its head."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from troll.huggingface.dropout import dropout_rates
from troll.huggingface.head import opened_head
from troll.huggingface.positions import positions_of, with_positions
from troll.huggingface.routers import load_balancing_loss
from troll.huggingface.token_ids import check_token_ids
from troll.trust_region.reading.head import LMHead

#: `(head of N tokens, their ids (N,)) -> tensors by name`.
Reader = Callable[[LMHead, Tensor], dict[str, Tensor]]

#: The argument of a model's forward that asks for a reading.
REQUEST = "troll_reading"

#: An attribute of a forward that takes requests.
_TAKES_REQUESTS = "_takes_troll_readings"

#: The number of roundings between a model's own logits and the first ones that are read: a model rounds after the
#: product, after its scale and after each part of a softcap.
_CHECKED_ROUNDINGS = 4

#: Models whose tokens see later ones; XLM's do not if it is configured as causal.
_NOT_CAUSAL = {"cpmant", "xlm", "xlnet"}

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ReadingRequest:
    """A request to a forward pass. DDP and FSDP pass it on unchanged, since they look only into containers.

    Attributes:
        token_ids: (N,) int64, the tokens to score.
        at: The row and the place of the hidden state that predicts each token, (N,) and (N,); a place is among the
            last L of its row.
        length: L, the hidden states of each row that are used.
        reader: Computes the results from the head and the tokens.
        temperature: The sampling temperature, which divides the logits.
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
    """The results of a request. Differentiable ones are outputs of the forward, where DDP and FSDP look for them.

    Attributes:
        tensors: The reader's tensors, with one row for each scored token in the order of `token_ids`.
        vocab_size: V, the rows of the head's weight.
        aux_loss: The router's load-balancing loss of a mixture of experts, with `output_router_logits=True`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    vocab_size: int | None = None
    aux_loss: Tensor | None = None


def forward_and_read(model: nn.Module, request: ReadingRequest, **inputs: Any) -> ReadingOutput:
    """Runs one forward pass of a model, and reads its head in it.

    Args:
        model: A model for `accept_requests`, which is called first.
        request: The tokens to score, and how.
        **inputs: Arguments of the forward: `input_ids` (B, L), `attention_mask`, images. Without position ids, they
            follow from the mask.

    Raises:
        ValueError: If the model's head cannot be read, or a token id has no embedding (found on a CPU only).
        RuntimeError: If the model's logits differ from those computed from its head and its configuration, or if a
            wrapper changes or rounds its outputs.
    """
    accept_requests(model)
    if inputs.get("input_ids") is not None:
        check_token_ids(causal_lm(model), inputs["input_ids"])
    return checked_output(model, model(**inputs, **{REQUEST: request}))


def accept_requests(model: nn.Module) -> None:
    """Makes a model's forward accept a request, by the name `REQUEST`; without one it works as before.

    At the first request, the reading is compared with the model's own logits.

    Args:
        model: A causal or vision-language model of transformers, also wrapped by PEFT, DDP, FSDP, DeepSpeed or
            `torch.compile`.

    Raises:
        ValueError: If it is not such a model, or has no head.
    """
    base: Any = causal_lm(model)
    if hasattr(base.forward, _TAKES_REQUESTS):
        return
    bound: Any = base.forward
    # A copy of the model has a copy of this forward, which must not compute with the weights of the original.
    function = bound.__func__ if getattr(bound, "__self__", None) is base else None
    # Under accelerate's mixed precision, the forward that is wrapped here enters autocast, and the reading would not.
    mixed = hasattr(base, "_original_forward")
    positions = positions_of(base)
    checked = False

    # The signature stays the model's: `generate` validates its arguments against it. The frame itself is not compiled,
    # as the tiles depend on the data; the backbone, which it calls, is.
    @functools.wraps(type(base).forward)
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        plain = bound if function is None else functools.partial(function, self)
        request: ReadingRequest | None = kwargs.pop(REQUEST, None)
        if request is None:
            return plain(*args, **kwargs)
        if mixed and not torch.is_autocast_enabled(request.token_ids.device.type):
            raise RuntimeError(
                "the model was prepared with mixed precision: read it within `with accelerator.autocast():`"
            )
        if kwargs.get("labels") is None:  # PEFT passes it on
            kwargs.pop("labels", None)
        if getattr(self.config.get_text_config(), "output_router_logits", False):  # as the model's own forward does
            kwargs.setdefault("output_router_logits", True)
        kwargs["use_cache"] = False
        if positions is not None:
            kwargs = with_positions(kwargs, positions)
        outputs = self.base_model(*args, **kwargs)
        if not checked:
            checked = _check_against_logits(self, plain, outputs, request, args, kwargs)
        return _read(self, outputs, request, kwargs)

    setattr(forward, _TAKES_REQUESTS, True)
    base.forward = types.MethodType(forward, base)


def checked_output(model: nn.Module, output: Any) -> ReadingOutput:
    """Checks the output of a forward that was given a request, and returns it.

    Raises:
        RuntimeError: If a wrapper changed or rounded it.
    """
    name = type(causal_lm(model)).__name__
    if not isinstance(output, ReadingOutput):
        raise RuntimeError(
            f"a wrapper of {name} changes what its forward returns to {type(output).__name__}: read the model "
            "without it"
        )
    rounded = [x.dtype for x in output.tensors.values() if x.dtype in HALF]
    if rounded:
        raise RuntimeError(
            f"the outputs of {name} are rounded to {rounded[0]}, too coarse for log-probabilities: with FSDP2, set "
            "output_dtype=None in its MixedPrecisionPolicy"
        )
    return output


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of PEFT, DDP, FSDP, DeepSpeed and `torch.compile`.

    Raises:
        ValueError: If there is none, it has no head, or it is not causal: an encoder-decoder, XLNet, XLM or CPM-Ant.
    """
    inner = unwrapped(model)
    if inner.get_output_embeddings() is None or inner.base_model is inner:
        raise ValueError(f"model must have a language-modelling head on a backbone, got {type(inner).__name__}")
    config = inner.config
    if config.is_encoder_decoder or (config.model_type in _NOT_CAUSAL and not getattr(config, "causal", False)):
        raise ValueError(f"model must be causal, and {type(inner).__name__} also reads the tokens that it scores")
    return inner


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of PEFT, DDP, FSDP, DeepSpeed and `torch.compile`.

    Raises:
        ValueError: If there is none.
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
    return inner


def _read(model: Any, outputs: Any, request: ReadingRequest, kwargs: dict[str, Any]) -> ReadingOutput:
    """Answers a request from a backbone's outputs."""
    # Aligned at the end: prompt-learning PEFT puts virtual tokens in front.
    hidden = outputs.last_hidden_state[:, -request.length :]
    tensors, vocab_size = _read_head(model, hidden[tuple(x.to(hidden.device) for x in request.at)], request)
    aux_loss: Any = None
    if kwargs.get("output_router_logits"):
        aux_loss = load_balancing_loss(model, outputs.router_logits, kwargs.get("attention_mask"))
    return ReadingOutput(tensors=tensors, vocab_size=vocab_size, aux_loss=aux_loss)


@torch.compiler.disable
def _read_head(model: Any, hidden: Tensor, request: ReadingRequest) -> tuple[dict[str, Tensor], int]:
    """The reader's tensors for (N, H) hidden states, and V."""
    with opened_head(model, hidden, request.temperature, request.head_in_float32) as head:
        tensors = request.reader(head, request.token_ids.to(head.hidden.device))
        # With a `device_map`, the head may be elsewhere. FSDP2 warns of outputs that are views.
        outputs = {name: x.to(request.token_ids.device) for name, x in tensors.items()}
        return {name: x.clone() if x._is_view() else x for name, x in outputs.items()}, head.width


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module has another forward; afterwards its own, with accelerate's hooks, is restored."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@torch.compiler.disable
@torch.no_grad()
def _check_against_logits(
    model: Any, plain: Any, outputs: Any, request: ReadingRequest, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Compares the head's logits with those that the model itself computes from a backbone's outputs.

    Processes exchange nothing here except for the shards of a head. Whether the logits differ depends on the model and
    not on its data, so the error is raised on all processes or on none, and none is left waiting.

    Returns:
        False if the comparison has to be repeated later: a model that bypasses its backbone cannot be compared while it
        has dropout, since no two passes agree; nor can logits with NaN, if there is one process. True if it was made,
        or never can be: some hosts replace the forward of the model's class by one without logits, as verl's fused
        kernels do.

    Raises:
        RuntimeError: If they differ: the model changes its logits in a way that is not in its configuration.
    """
    used: list[bool] = []

    def given(*_: Any, **__: Any) -> Any:
        used.append(True)
        return outputs

    # Logits of all tokens may not fit into memory: the head gets only the last hidden states, even if the model's
    # forward does not take `logits_to_keep`. Some models multiply by the head's weight without calling the head.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    trimmed = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0][:, -1:], *inputs[1:])
    )
    devices = [request.token_ids.device] if request.token_ids.is_cuda else []
    # The fork keeps this check from changing a run's random numbers.
    with trimmed, replaced_forward(model.base_model, given), torch.random.fork_rng(devices):
        logits = plain(*args, **{**kwargs, "return_dict": True}, **last).logits
    if logits is None:
        return True
    if not used and ((model.training and any(dropout_rates(model))) or kwargs.get("past_key_values") is not None):
        return False
    logits = logits[:, -1]
    hidden = outputs.last_hidden_state[:, -1]
    with opened_head(model, hidden, 1.0, request.head_in_float32) as read:
        product = nn.functional.linear(read.hidden, read.weight, read.bias)
        own = read.transform(product.to(torch.promote_types(product.dtype, torch.float32)))
    logits = logits.to(own)
    if bool(logits.isnan().any() | (logits == torch.inf).any()):
        # Repeated by this process only, it would gather a sharded head while the others, which have compared, do not.
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return several and torch.distributed.get_world_size() > 1
    finite = logits.isfinite()
    difference = (own - logits).masked_fill(~finite, 0).abs().max()
    # The product of half precision is rounded once; that of float32 is a sum of roundings.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else product.dtype
    roundings = _CHECKED_ROUNDINGS * (1 if dtype in HALF else hidden.shape[-1]) * torch.finfo(dtype).eps
    largest = logits.masked_fill(~finite, 0).abs().max().clamp(min=1)
    if not bool((difference <= roundings * largest) & (finite == own.isfinite()).all()):
        raise RuntimeError(
            f"the logits of {type(model).__name__} are not those of its head: they differ by {float(difference):.2g}, "
            f"and {int((~finite).sum())} are -inf. It changes them in a way that its configuration does not say; read "
            "its logits with troll.capture and troll.trust_region_step instead"
        )
    return True
