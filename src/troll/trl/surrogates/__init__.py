"""Surrogates: the methods that keep an update near the old policy, TROLL's projection among them.

A surrogate is a function from `ScoredTokens` to `Terms`, and a dataclass of its settings if it has any. To add one of
your own, register both under a name; docs/surrogates.md has a complete file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trl import GRPOConfig

from troll.settings import did_you_mean, number, same_origin
from troll.trl.surrogates.formulas import KLPenaltySettings, kl_penalty, regression, troll
from troll.trl.surrogates.terms import NoSettings, ScoredTokens, Surrogate, Terms
from troll.trust_region.probabilities import divergence, floored
from troll.trust_region.projection import CommonOutcomes
from troll.trust_region.step import common_outcomes, pull_to_old

__all__ = [
    "CommonOutcomes",
    "KLPenaltySettings",
    "NoSettings",
    "ScoredTokens",
    "Surrogate",
    "Terms",
    "common_outcomes",
    "divergence",
    "floored",
    "kl_penalty",
    "number",
    "pull_to_old",
    "register_surrogate",
    "regression",
    "troll",
]

_TROLL_SETTINGS = (
    "kl_bound",
    "pull",
    "regression_weight",
    "support_top_k",
    "mass_threshold",
    "constraint",
    "constraint_reduction",
)

#: What any surrogate reads if updates measure distributions for another reason than the surrogate.
MEASURING = ("support_top_k", "mass_threshold")

#: The registered surrogates by name.
SURROGATES: dict[str, Surrogate] = {
    "troll": Surrogate(troll, fields=_TROLL_SETTINGS, projects=True, reads_policies=True),
    "regression": Surrogate(regression, fields=_TROLL_SETTINGS, projects=True, reads_policies=True),
    "kl_penalty": Surrogate(kl_penalty, KLPenaltySettings, ("support_top_k", "mass_threshold"), reads_policies=True),
    "clip": Surrogate(fields=("epsilon", "epsilon_high", "delta"), clips=True),
    "cispo": Surrogate(fields=("epsilon_high",), sets={"loss_type": "cispo"}),
    "sapo": Surrogate(fields=("sapo_temperature_pos", "sapo_temperature_neg"), sets={"loss_type": "sapo"}),
    "vespo": Surrogate(
        fields=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), sets={"loss_type": "vespo"}
    ),
    "none": Surrogate(),
}


def register_surrogate(name: str, surrogate: Surrogate) -> None:
    """Registers a surrogate under a name, which `TrollConfig.surrogate` takes from then on.

    Args:
        name: The name, of letters, digits and `_`. One that is taken is an error, unless its function is of the same
            module, such as one that is reloaded, or a notebook: the last registration counts.
        surrogate: The surrogate.

    Raises:
        ValueError: If another module's surrogate has the name, or a part of the surrogate is not what it must be.
    """
    if not name.isidentifier():
        raise ValueError(f"name must consist of letters, digits and _, and begin with a letter or _, got {name!r}")
    earlier = SURROGATES.get(name)
    if earlier is not None and earlier != surrogate and not same_origin(earlier.terms, surrogate.terms):
        raise ValueError(f"surrogate {name!r} is registered already: choose another name")
    _check(name, surrogate)
    SURROGATES[name] = surrogate


def _check(name: str, surrogate: Surrogate) -> None:
    """Raises ValueError unless the parts of a surrogate are what they must be."""
    if surrogate.terms is not None and not callable(surrogate.terms):
        raise ValueError(f"terms of surrogate {name!r} must be a function or None, got {surrogate.terms!r}")
    own = surrogate.own
    if not (isinstance(own, type) and dataclasses.is_dataclass(own)):
        raise ValueError(f"own of surrogate {name!r} must be a dataclass, got {own!r}")
    for field in dataclasses.fields(own):
        if field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"own of surrogate {name!r} must have a default for each field, and {field.name} has none")
    if isinstance(surrogate.fields, str):
        raise ValueError(f"fields of surrogate {name!r} must be a tuple of names, got {surrogate.fields!r}")
    for field_name in surrogate.sets:
        if field_name not in GRPOConfig.__dataclass_fields__:
            hint = did_you_mean(field_name, GRPOConfig.__dataclass_fields__)
            raise ValueError(f"sets of surrogate {name!r} must name fields of GRPOConfig, got {field_name!r}{hint}")


def check_surrogate(name: str) -> None:
    """Raises ValueError unless a surrogate of this name is registered."""
    if name not in SURROGATES:
        raise ValueError(
            f"surrogate must be one of {', '.join(SURROGATES)}, got {name!r}: another one is known once the file that "
            "registers it is imported, such as troll_lab.rivals, or in a recipe a file of `plugins`"
        )


def settings_read(args: Any) -> dict[str, Any]:
    """The values of `Surrogate.reads` in a `TrollConfig`, by name, and of `MEASURING` if its updates read policies.

    Raises:
        ValueError: If the surrogate reads a field that a `TrollConfig` does not have.
    """
    surrogate = SURROGATES[args.surrogate]
    for name in surrogate.fields:
        if not hasattr(args, name):
            hint = did_you_mean(name, type(args).__dataclass_fields__)
            raise ValueError(f"fields of surrogate {args.surrogate!r} must be settings, got {name!r}{hint}")
    own = {f"surrogate_kwargs.{name}": value for name, value in vars(args.own_settings).items()}
    measuring = MEASURING if args.reads_policies else ()
    return {name: getattr(args, name) for name in (*surrogate.fields, *measuring)} | own
