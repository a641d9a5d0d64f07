"""A model on tensors without data, which have only a shape and a dtype: nothing is downloaded and nothing computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from troll.terminal import one_line


class UnknownMemory(RuntimeError):
    """Raised for a model that does not run on tensors without data."""


@dataclass(frozen=True, eq=False)
class Network:
    """A model as a run loads it. It is compared by identity, so that its measurements can be kept.

    Attributes:
        config: Its configuration, a `PreTrainedConfig`.
        dtype: The dtype of its weights.
        peft: The `LoraConfig` of its adapter; None trains all weights.
        bits: 4 or 8 if bitsandbytes quantises the weights below the adapter; else None.
        checkpointing: Whether layers are computed again in the backward pass.
        trust_remote_code: Whether an architecture that transformers lacks may run from its own files.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    peft: Any | None = None
    bits: int | None = None
    checkpointing: bool = False
    trust_remote_code: bool = False


@contextmanager
def without_data(network: Network, training: bool = False) -> Iterator[Any]:
    """The model; all tensors that are made within the context have a shape and a dtype, but no data."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            model = _on_meta(network, training)
            with FakeTensorMode():
                yield _filled(model)
    except Exception as error:  # the code of an architecture may raise anything
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
    """Replaces every tensor on the meta device, where autocast does nothing, by one on the CPU."""
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


def base_of(model: Any) -> Any:
    """The model below its adapter, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
