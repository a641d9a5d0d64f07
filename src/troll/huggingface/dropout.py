"""Finds a model's dropout, and other noise that makes the new policy differ from the old one before any update."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

#: The names of attributes in which modules of transformers keep a rate that a function reads, instead of a layer of
#: torch: `torch.nn.functional.dropout`, an attention kernel, or a draw that skips a whole layer. And the noise on the
#: hidden states that a router of experts reads.
_FUNCTIONAL_RATE = re.compile("dropout|pdrop|layerdrop|drop_(prob|rate)|^(input_)?jitter_noise$|^moe_jitter_eps$")
#: The kinds of models whose forward reads the rates of the configuration.
_READ_FROM_CONFIG = {"falcon", "gpt_neo", "persimmon"}


def dropout_rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Every non-zero dropout rate of a model, as a module or configuration and the name of its attribute."""
    for module in (*model.modules(), *_read_configurations(model)):
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        for name in ("p",) if is_layer else filter(_FUNCTIONAL_RATE.search, tuple(vars(module))):
            rate = getattr(module, name)
            if isinstance(rate, float) and rate > 0:
                yield module, name


def disable_dropout(model: nn.Module) -> None:
    """Sets all dropout rates to 0, those of layers and those that a function reads instead, and routers' noise.

    Phi-MoE's routers draw experts at random in training mode, which no setting switches off.
    """
    for module, name in list(dropout_rates(model)):
        setattr(module, name, 0.0)


def _read_configurations(model: nn.Module) -> list[Any]:
    """The distinct configurations whose rates a forward reads."""
    found = {id(x): x for module in model.modules() if (x := getattr(module, "config", None)) is not None}
    return [x for x in found.values() if getattr(x, "model_type", None) in _READ_FROM_CONFIG]


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
