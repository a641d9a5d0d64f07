"""Surrogates: the methods that keep an update near the old policy, TROLL's projection among them.

To add one, write a function from `ScoredTokens` to `Terms`, and a class for its settings if it has any, and register
both in `SURROGATES`.
"""

from __future__ import annotations

from typing import Any

from troll.trl.surrogates import formulas, masks
from troll.trl.surrogates.terms import NoSettings, ScoredTokens, Surrogate, Terms

__all__ = ["SURROGATES", "NoSettings", "ScoredTokens", "Surrogate", "Terms", "settings_read"]

_OUTCOMES = ("support_top_k", "mass_threshold")
_TROLL_SETTINGS = (
    "kl_bound",
    "pull",
    "regression_weight",
    "support_top_k",
    "mass_threshold",
    "constraint",
    "constraint_reduction",
)


def _always(own: Any) -> bool:
    return True


def _on_top_k(own: masks.DPPOTVSettings | masks.DPPOKLSettings) -> bool:
    return own.outcomes == "top_k"


SURROGATES: dict[str, Surrogate] = {
    "troll": Surrogate(formulas.troll, fields=_TROLL_SETTINGS, projects=True, reads_policies=_always),
    "regression": Surrogate(formulas.regression, fields=_TROLL_SETTINGS, projects=True, reads_policies=_always),
    "kl_penalty": Surrogate(formulas.kl_penalty, formulas.KLPenaltySettings, _OUTCOMES, reads_policies=_always),
    "clip": Surrogate(fields=("epsilon", "epsilon_high", "delta"), clips=True),
    "dppo_tv": Surrogate(masks.dppo_tv, masks.DPPOTVSettings, _OUTCOMES, reads_policies=_on_top_k),
    "dppo_kl": Surrogate(masks.dppo_kl, masks.DPPOKLSettings, _OUTCOMES, reads_policies=_on_top_k),
    "drpo": Surrogate(formulas.drpo, formulas.DRPOSettings),
    "ipo": Surrogate(masks.ipo, masks.IPOSettings),
    "icepop": Surrogate(masks.icepop, masks.IcePopSettings),
    "kpop": Surrogate(masks.kpop, masks.KPopSettings),
    "trm": Surrogate(masks.trm, masks.TRMSettings),
    "m2po": Surrogate(masks.m2po, masks.M2POSettings),
    "cppo": Surrogate(masks.cppo, masks.CPPOSettings),
    "gmpo": Surrogate(
        formulas.gmpo, formulas.GMPOSettings, sets={"loss_type": "grpo", "importance_sampling_level": "sequence"}
    ),
    "cispo": Surrogate(fields=("epsilon_high",), sets={"loss_type": "cispo"}),
    "sapo": Surrogate(fields=("sapo_temperature_pos", "sapo_temperature_neg"), sets={"loss_type": "sapo"}),
    "vespo": Surrogate(
        fields=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), sets={"loss_type": "vespo"}
    ),
    "none": Surrogate(),
}


def settings_read(args: Any) -> dict[str, Any]:
    """The values of `Surrogate.reads` in a `TrollConfig`, by name."""
    surrogate = SURROGATES[args.surrogate]
    own = {f"surrogate_kwargs.{name}": value for name, value in vars(args.own_settings).items()}
    return {name: getattr(args, name) for name in surrogate.fields} | own
