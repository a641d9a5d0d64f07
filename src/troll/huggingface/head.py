"""The head of a causal language model: its weight, and the scale and softcap of its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from troll.trust_region.reading.head import LMHead

#: Gemma's name for the final softcap, RecurrentGemma's and xLSTM's.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@contextmanager
def opened_head(model: PreTrainedModel, hidden: Tensor, temperature: float, in_float32: bool) -> Iterator[LMHead]:
    """The head of a model on some hidden states, with its weights gathered within the context.

    Under ZeRO-3 the weights are gathered within the context, and again in the backward pass. A weight that FSDP2
    still holds in shards, such as that of a head sharded separately, is gathered once for both passes.

    Args:
        model: A causal language model, inside its forward pass.
        hidden: Its last hidden states, (N, H).
        temperature: The sampling temperature, which divides the logits.
        in_float32: Whether the product is computed in float32, outside autocast.

    Raises:
        ValueError: If the head is not a matrix that can be read: it is quantised, offloaded, or has an adapter.
    """
    head: Any = model.get_output_embeddings()
    refuse_head(head)
    weight, bias = head.weight, getattr(head, "bias", None)
    scale, softcap = scale_and_softcap(model)
    hidden = hidden.to(weight.device)  # a model split by `device_map` may end elsewhere
    autocast: AbstractContextManager[Any] = nullcontext()
    if in_float32:
        hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    elif weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weight.dtype)  # Mamba's are float32 with weights in bf16, HY-V4's head is float32 after bf16
    with autocast, gathered(weight, bias):
        whole_bias = None if bias is None else _whole(bias)
        yield LMHead(hidden, _whole(weight), whole_bias, temperature, scale, softcap, gathered=gathered)


def refuse_head(head: Any) -> None:
    """Raises ValueError unless the model computes its logits as the product of hidden states with the head's matrix."""
    name = type(head).__name__
    if hasattr(head, "base_layer"):
        raise ValueError(
            f"the LM head has an adapter ({name} of PEFT), which would have to be multiplied out for the whole "
            "vocabulary: leave it out of target_modules, or train it whole with modules_to_save"
        )
    if isinstance(head, FullyShardedDataParallel):
        raise ValueError("FSDP 1 has made the LM head a unit of its own, which it does not gather for a reading")
    if hasattr(head, "token_adapter"):  # its weight is made of the base's and the trained rows, each time it is read
        base = head.token_adapter.base_layer.weight
        if isinstance(base, DTensor) or hasattr(base, "ds_id"):
            raise ValueError(
                "the LM head has trainable_token_indices, its own or those of the embedding that it is tied to, and "
                "FSDP2 or ZeRO-3 has only shards of its weight: leave trainable_token_indices out, train both whole "
                "with modules_to_save and ensure_weight_tying, or use DDP"
            )
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"the model's output embeddings must be a linear layer with a weight, got {name}")
    if weight.is_meta:
        raise ValueError("the LM head is offloaded: keep it on a device, with another device_map or max_memory")
    if isinstance(weight, DTensor) and weight.device.type != weight.device_mesh.device_type:
        raise ValueError("FSDP2 has offloaded the LM head's shards to host memory: switch that off")
    if not weight.is_floating_point() or type(weight) not in (nn.Parameter, Tensor, DTensor):
        kind = f"{weight.dtype} in {type(weight).__name__}"
        raise ValueError(f"the LM head is quantised ({kind}): leave it out, as with llm_int8_skip_modules=['lm_head']")


def scale_and_softcap(model: PreTrainedModel) -> tuple[float, float | None]:
    """The scale of a model's logits and its final softcap, under all names that configurations have for them."""
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in _SOFTCAPS)
    softcap = next((cap for cap in caps if cap is not None), None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse Glimmer; Falcon-H1
        if (scale := getattr(config, name, None)) is not None:
            return float(scale), softcap
    divisor = getattr(config, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if divisor is None:
        return 1.0, softcap
    return float(divisor if config.model_type == "hyperclovax" else 1 / divisor), softcap


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which parameters are gathered if ZeRO-3 has sharded them."""
    sharded = {id(x): x for x in parameters if x is not None and _is_zero_shard(x)}
    if not sharded:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(sharded.values()))
    return context


def _is_zero_shard(parameter: Tensor) -> bool:
    if not hasattr(parameter, "ds_status"):
        return False
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return bool(parameter.ds_status != ZeroParamStatus.AVAILABLE)


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    # Each process has the gradient of its own data, and FSDP2 averages them. By default each would keep its
    # slice of its own gradient.
    whole: Tensor = parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)
    return whole
