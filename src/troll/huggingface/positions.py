"""Position ids that follow from the attention mask."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn


def with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Adds position ids to the arguments of a model's forward, if it has an attention mask and no position ids.

    They are those of `generate`: the first token that is not padding is at position 0. Without them, most models count
    from the first column, and read a row that is padded on the left at other positions than those of its sampling.

    Models without the argument `position_ids` are left alone, and vision-language models, which make positions of their
    images.

    Args:
        model: A model of transformers, or its backbone.
        inputs: Arguments by name.
    """
    return _filled(inputs) if _takes_positions(model) else inputs


def positions_from_mask(model: Any) -> None:
    """Gives the backbone of a model the position ids of `with_positions` in every forward, whoever calls it."""
    backbone = model.base_model
    if _takes_positions(backbone):
        names = tuple(inspect.signature(type(backbone).forward).parameters)[1:]
        backbone.register_forward_pre_hook(functools.partial(_before_forward, names), with_kwargs=True)


def _before_forward(names: tuple[str, ...], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (), _filled({**dict(zip(names, args, strict=False)), **kwargs})


def _filled(inputs: dict[str, Any]) -> dict[str, Any]:
    mask = inputs.get("attention_mask")
    # A mask of four dimensions does not say where a row begins.
    if not isinstance(mask, Tensor) or mask.dim() != 2 or inputs.get("position_ids") is not None:
        return inputs
    tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    # The mask also covers the tokens in a cache, such as the prefix of an adapter.
    return {**inputs, "position_ids": positions[:, -tokens.shape[1] :]}


def _takes_positions(model: Any) -> bool:
    """Whether it is a model of text that takes position ids."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return False
    return model.config.get_text_config() is model.config
