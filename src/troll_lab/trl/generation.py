"""Generation by transformers in chunks, which bounds the KV cache."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module


def generate_in_chunks(model: Any, size: int) -> None:
    """Makes `model.generate` of transformers or PEFT generate at most `size` completions at a time.

    The KV cache then has at most `size` sequences. A call is not changed if it returns more than token ids, or if its
    tensors cannot be split by prompt, for example with several images per prompt in Qwen's models.
    """
    inner = type(model).generate

    @functools.wraps(inner)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or self.generation_config
        dictionary = kwargs.get("return_dict_in_generate", config.return_dict_in_generate)
        chunks = None if args or dictionary else split(kwargs, size)
        # accelerate's FSDP2 does not set the mark that transformers looks for.
        if is_deepspeed_zero3_enabled() or isinstance(self, FSDPModule) or is_fsdp_managed_module(self):
            # Processes that share the weights need equally many calls, and perhaps only some can split their images.
            chunks = chunks if all(gather_object([chunks is not None])) else None
        if chunks is None:
            return inner(self, *args, **kwargs)
        outputs = [inner(self, **kwargs | chunk) for chunk in chunks]
        lengths = {ids.shape[1] for ids in outputs}
        if len(lengths) == 1:
            return torch.cat(outputs)
        # TRL sets the model's padding token; a configuration of the caller may have none.
        filler = self.generation_config.pad_token_id if config.pad_token_id is None else config.pad_token_id
        return torch.cat([pad(ids, (0, max(lengths) - ids.shape[1]), value=filler) for ids in outputs])

    # A method of the instance, so that a copy of the model generates with its own weights.
    model.generate = MethodType(generate, model)


def split(inputs: dict[str, Any], size: int) -> list[dict[str, Tensor]] | None:
    """Splits the arguments of `generate` for a batch of B prompts into those of at most `size` prompts each.

    Args:
        inputs: Keyword arguments of `generate`: `input_ids` (B, L), and tensors with one row a prompt. With
            `image_grid_thw` (B, 3), one image a prompt, `pixel_values` holds the patches of all images in a row.
        size: Prompts in each part; the last may have fewer.

    Returns:
        The tensors of each part; None if B is at most `size`, or some tensor cannot be split.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if "input_ids" not in tensors or len(tensors["input_ids"]) <= size:
        return None
    rows = len(tensors["input_ids"])
    parts: dict[str, tuple[Tensor, ...]] = {}
    if "image_grid_thw" in tensors and "pixel_values" in tensors:
        patches = [int(sum(grids.prod(-1))) for grids in tensors["image_grid_thw"].split(size)]
        if len(tensors["image_grid_thw"]) != rows or sum(patches) != len(tensors["pixel_values"]):
            return None
        parts["pixel_values"] = tensors.pop("pixel_values").split(patches)
    if any(value.dim() == 0 or len(value) != rows for value in tensors.values()):
        return None
    parts |= {name: value.split(size) for name, value in tensors.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
