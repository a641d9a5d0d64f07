"""Finds a model's dropout, and other noise that makes the new policy differ from the old one before any update."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

#: The names of attributes in which modules of transformers keep a rate that a function reads, instead of a layer of
#: torch: `torch.nn.functional.dropout`, an attention kernel, or a draw that skips a whole layer. Also the names of the
#: noise on the hidden states that a router of experts reads.
_FUNCTIONAL_RATE = re.compile("dropout|pdrop|layerdrop|drop_(prob|rate)|^(input_)?jitter_noise$|^moe_jitter_eps$")
#: The rates that a forward reads from the configuration, by the kind of model.
_READ_FROM_CONFIG = {
    "blt_global_transformer": ("dropout",),
    "blt_local_decoder": ("dropout",),
    "blt_local_encoder": ("dropout",),
    "falcon": ("attention_dropout", "hidden_dropout"),
    "gpt_neo": ("attention_dropout",),
    "persimmon": ("attention_dropout",),
}


def dropout_rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every non-zero dropout rate of a model, as a module or configuration and the name of its attribute."""
    places: dict[tuple[int, str], Any] = {}
    for module in model.modules():
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        for name in ("p",) if is_layer else filter(_FUNCTIONAL_RATE.search, vars(module)):
            places[id(module), name] = module
        config = getattr(module, "config", None)
        for name in _READ_FROM_CONFIG.get(getattr(config, "model_type", ""), ()):
            places[id(config), name] = config
    for (_, name), place in places.items():
        rate = getattr(place, name)
        if isinstance(rate, float) and rate > 0:
            yield place, name


def disable_dropout(model: nn.Module) -> None:
    """Sets all dropout rates to 0, those of layers and those that a function reads instead, and routers' noise.

    Phi-MoE's routers draw experts at random in training mode, which no setting switches off.
    """
    for module, name in list(dropout_rates(model)):
        setattr(module, name, 0.0)


def warn_about_dropout(model: nn.Module) -> None:
    """Warns of dropout that acts in the next forward pass; Python shows the warning once for each line of a caller."""
    if not model.training:
        return
    for module, name in dropout_rates(model):
        if getattr(module, "training", True):  # configurations have no mode
            warnings.warn(
                f"the model is in training mode and has dropout ({name}={getattr(module, name)} of "
                f"{type(module).__name__}): its policy differs between capture and step by that noise, which the trust "
                "region projects. Set its rates to 0, or call model.eval()",
                stacklevel=3,
            )
            return
