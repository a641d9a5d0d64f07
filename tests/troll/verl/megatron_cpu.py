"""Megatron on a CPU: its own modules and schedules, with an attention in place of Transformer Engine's.

Megatron asks CUDA by name for buffers and random numbers. `on_cpu` answers with the CPU, in tests only.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.overrides import TorchFunctionMode

if importlib.util.find_spec("einops") is None:  # mbridge imports it, for a model that is not used here
    sys.modules["einops"] = mock.MagicMock()

from mbridge.core import llm_bridge
from mbridge.core import util as mbridge_util
from mbridge.models.qwen3 import Qwen3Bridge
from verl.workers.engine.megatron import utils as megatron_utils

#: What Megatron's own layers call the parameters that Transformer Engine fuses into the next one.
UNFUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class CausalAttention(torch.nn.Module):
    """Causal attention, of packed or right-padded sequences, also where they are spread in a zigzag."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(tokens, heads, channels) of a pack, or (tokens, batch, heads, channels)."""
        cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        bounds = [0, len(query) * cp]
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        places = [_places(bounds, cp, r) for r in range(cp)]
        if cp > 1:
            group = mpu.get_context_parallel_group()
            key, value = (torch.cat(all_gather(x.contiguous(), group)) for x in (key, value))
        own, everyone = places[rank], torch.cat(places)
        sees = (own[:, None, 0] == everyone[None, :, 0]) & (own[:, None, 1] >= everyone[None, :, 1])
        # (..., heads, tokens, channels)
        q, k, v = (x.movedim(0, -2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return out.movedim(-2, 0).flatten(-2)


def _places(bounds: list[int], cp: int, rank: int) -> Tensor:
    """(tokens, 2), the sequence and the position in it of the tokens that a process holds."""
    parts = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        position = torch.arange(end - start)
        if cp > 1:
            chunks = position.chunk(2 * cp)
            position = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
        parts.append(torch.stack([torch.full_like(position, number), position], -1))
    return torch.cat(parts)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron's models, schedules and optimizer, of the layers that need neither CUDA nor Transformer Engine."""
    names = Qwen3Bridge._weight_name_mapping_mcore_to_hf

    def fused(self: Qwen3Bridge, name: str) -> list[str]:
        for unfused, known in UNFUSED.items():
            name = name.replace(unfused, known)
        return names(self, name)

    def local_spec(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, **kwargs)

    with ExitStack() as stack:
        for patch in (
            mock.patch("torch.cuda.current_device", lambda: "cpu"),
            mock.patch("torch.cuda.synchronize", lambda *_: None),
            mock.patch("torch.cuda.get_rng_state", torch.get_rng_state),
            mock.patch("torch.cuda.manual_seed", torch.manual_seed),
            mock.patch.object(megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            mock.patch.object(
                megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)
            ),
            # verl after 0.9.1 seeds Megatron's random numbers only where it finds CUDA.
            mock.patch.object(megatron_utils, "is_cuda_available", True, create=True),
            # mbridge 0.15.1 asks for it, and megatron-core 0.18 no longer has it.
            mock.patch.object(mbridge_util.ModelType, "encoder_and_decoder", None, create=True),
            mock.patch.object(LocalSpecProvider, "core_attention", lambda _: CausalAttention),
            mock.patch.object(llm_bridge, "get_gpt_decoder_block_spec", local_spec),
            mock.patch.object(Qwen3Bridge, "_weight_name_mapping_mcore_to_hf", fused),
            _OnCpu(),
        ):
            stack.enter_context(patch)
        yield
