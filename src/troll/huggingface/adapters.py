"""Adapters of PEFT on weights that several modules of a model share.

In PEFT's forward, such an adapter changes only its own module. Merged into the weight, it changes all of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

#: Parts of a module's name that PEFT adds.
_ADDED = ("base_layer", "token_adapter", "original_module")

#: A part of the name of a module that replaces another in training, by `modules_to_save`.
_SAVED = ".modules_to_save."

#: A parameter: its module's name, the module, and its name there.
Place = tuple[str, nn.Module, str]


def adapted_and_shared(model: nn.Module) -> list[list[Place]]:
    """The modules of each weight that several modules share, if an adapter changes it in at least one of them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper  # of modules_to_save and trainable_token_indices

    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    adapted = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, kinds))
    return [
        group
        for group in _shared(model)
        if _SAVED not in group[0][0] and any(f"{name}.".startswith(adapted) for name, _, _ in group)
    ]


def _shared(model: nn.Module) -> list[list[Place]]:
    places: dict[int, list[Place]] = defaultdict(list)
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((name, module, own))
    return [group for group in places.values() if len(group) > 1]


def refuse_merging(model: nn.Module, setting: str) -> None:
    """Checks that merging adapters gives the model of PEFT's forward.

    Args:
        model: A model of transformers, with adapters or without.
        setting: The setting that requires merging, for the error.

    Raises:
        ValueError: If an adapter changes a weight that several modules share, or trains single tokens
            (`trainable_token_indices`), whose weights reach the engine under names that it does not know.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if any(getattr(config, "trainable_token_indices", None) for config in configs.values()):
        raise ValueError(
            f"{setting} cannot be used with trainable_token_indices, which reach the engine under names that it does "
            f"not know: train the embedding with modules_to_save, leave them out, or do without {setting}"
        )
    if not configs:
        return
    for group in _shared(model):
        if _SAVED in group[0][0] and len({id(_original(model, name, own)) for name, _, own in group}) > 1:
            raise ValueError(
                f"{setting} cannot be used with ensure_weight_tying where {_names(group)} are trained as one weight "
                "and the model itself has two: the engine would get the trained weight for only one of them. Leave "
                f"ensure_weight_tying out, or do without {setting}"
            )
    for group in adapted_and_shared(model):
        if len({id(_trained(model, name, own)) for name, _, own in group}) > 1:  # not tied again, by modules_to_save
            raise ValueError(
                f"{setting} merges the adapter into the weight that {_names(group)} share (by tie_word_embeddings or "
                "layer_replication), which changes all of them, and in training the adapter changes one: leave them "
                "out of target_modules and modules_to_save, save the model with a weight for each "
                f"(tie_word_embeddings=False), or do without {setting}"
            )


def _names(group: list[Place]) -> str:
    names = [name.removeprefix("base_model.model.").partition(_SAVED)[0].split(".") for name, _, _ in group]
    return " and ".join(".".join(part for part in name if part not in _ADDED) for name in names)


def _original(model: nn.Module, name: str, own: str) -> Any:
    """The model's own parameter, which a parameter of `modules_to_save` replaces in training."""
    wrapper: Any = model.get_submodule(name.partition(_SAVED)[0])
    return getattr(wrapper.original_module, own)


def _trained(model: nn.Module, name: str, own: str) -> Any:
    """The parameter that `modules_to_save` trains instead of this one.

    Without one, it is the module's name, so that two such modules count as different.
    """
    from peft.utils import ModulesToSaveWrapper

    wrapper = model.get_submodule(name.removesuffix(".original_module"))
    return getattr(wrapper, own) if isinstance(wrapper, ModulesToSaveWrapper) else name
