"""Position ids that follow from the attention mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Makes the position ids of rows from their attention mask, both (B, L).
Positions = Callable[[Tensor], Tensor]

#: Model types with rotary positions that also scale queries by the position itself.
_SCALED_BY_POSITION = {"beam", "llama4_text", "ministral3", "mistral4"}

#: Kinds of rotary positions whose frequencies change with the largest position.
_SCALED_BY_LENGTH = {"dynamic", "longrope"}


def positions_of(model: Any) -> Positions | None:
    """How the position ids of a model follow from the attention mask.

    Without position ids, most models count from the first column, and `generate` from the first token that is not
    padding: a row that is padded on the left is then read at other positions than those of its sampling.

    Args:
        model: A model of transformers, or its backbone.

    Returns:
        `from_zero`, the positions of `generate`; or `without_gaps` for rotary positions, of which only differences
        count, so that their absolute values, and the last bits of all scores, stay the model's own. None for a model
        without the argument `position_ids`, and for a vision-language model, which makes positions of its images.
    """
    config = model.config
    takes_them = "position_ids" in inspect.signature(type(model).forward).parameters
    if not takes_them or config.get_text_config() is not config:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    differences_only = (
        any("Rotary" in type(module).__name__ for module in model.modules())
        and config.model_type not in _SCALED_BY_POSITION
        and not kinds & _SCALED_BY_LENGTH
    )
    return without_gaps if differences_only else from_zero


def from_zero(mask: Tensor) -> Tensor:
    """Counts the tokens of each row from 0; 0 at padding, as in `generate`."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def without_gaps(mask: Tensor) -> Tensor:
    """Counts columns, except for padding between two tokens of a row, as after the prefix of an adapter."""
    tokens = mask != 0
    inside = (tokens.cumsum(-1) > 0) & (tokens.flip(-1).cumsum(-1).flip(-1) > 0)
    return torch.arange(mask.shape[-1], device=mask.device) - (inside & ~tokens).cumsum(-1)


def with_positions(inputs: dict[str, Any], positions: Positions) -> dict[str, Any]:
    """Adds position ids to the arguments of a forward that have an attention mask and no position ids."""
    mask = inputs.get("attention_mask")
    # A mask of four dimensions does not say where a row begins.
    if not isinstance(mask, Tensor) or mask.dim() != 2 or inputs.get("position_ids") is not None:
        return inputs
    tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    # The mask also covers the tokens of a cache, such as the prefix of an adapter.
    return {**inputs, "position_ids": positions(mask.long())[:, -tokens.shape[1] :]}


def positions_from_mask(model: Any) -> None:
    """Gives the backbone of a model its position ids in every forward, from any caller."""
    backbone = model.base_model
    positions = positions_of(backbone)
    if positions is not None:
        names = tuple(inspect.signature(type(backbone).forward).parameters)[1:]
        hook = functools.partial(_before_forward, names, positions)
        backbone.register_forward_pre_hook(hook, with_kwargs=True)


def _before_forward(
    names: tuple[str, ...], positions: Positions, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return (), with_positions({**dict(zip(names, args, strict=False)), **kwargs}, positions)
