"""Surrogates, which keep an update near the old policy: TROLL's projection and its rivals.

To add one, write a function from `ScoredTokens` to `Terms` and register it in `SURROGATES`.
"""

from __future__ import annotations

from troll.trl.surrogates.formulas import dppo_kl, dppo_tv, drpo, gmpo, ipo, kl_penalty, regression, troll
from troll.trl.surrogates.terms import ScoredTokens, Surrogate, Terms

__all__ = ["SURROGATES", "ScoredTokens", "Surrogate", "Terms"]

_OUTCOMES = ("tail", "support_top_k", "mass_threshold")
_TROLL_SETTINGS = (
    "kl_bound",
    "kl_bound_schedule",
    "kl_bound_schedule_kwargs",
    "kl_bound_entropy_exponent",
    "kl_bound_negative_ratio",
    "pull",
    "regression_weight",
    "regression_target",
    "tail",
    "solver",
    "support_top_k",
    "mass_threshold",
    "constraint",
    "constraint_reduction",
)
_DPPO_SETTINGS = ("dppo_threshold", "dppo_outcomes", *_OUTCOMES)

SURROGATES: dict[str, Surrogate] = {
    "troll": Surrogate(
        settings=_TROLL_SETTINGS, terms=troll, penalty="regression", projects=True, reads_policies=lambda args: True
    ),
    "regression": Surrogate(
        settings=_TROLL_SETTINGS,
        terms=regression,
        penalty="regression",
        projects=True,
        reads_policies=lambda args: True,
    ),
    "kl_penalty": Surrogate(
        settings=(
            "kl_penalty_weight",
            "kl_penalty_direction",
            "kl_penalty_target",
            "kl_penalty_clip",
            "kl_penalty_cap",
            *_OUTCOMES,
        ),
        terms=kl_penalty,
        penalty="kl_penalty",
        reads_policies=lambda args: True,
    ),
    "clip": Surrogate(settings=("epsilon", "epsilon_high", "delta"), clips=True),
    "dppo_tv": Surrogate(
        settings=_DPPO_SETTINGS, terms=dppo_tv, reads_policies=lambda args: args.dppo_outcomes == "top_k"
    ),
    "dppo_kl": Surrogate(
        settings=_DPPO_SETTINGS, terms=dppo_kl, reads_policies=lambda args: args.dppo_outcomes == "top_k"
    ),
    "drpo": Surrogate(settings=("drpo_threshold",), terms=drpo),
    "ipo": Surrogate(settings=("ipo_threshold", "ipo_kl_weight"), terms=ipo),
    "gmpo": Surrogate(
        settings=("gmpo_range",), terms=gmpo, sets={"loss_type": "grpo", "importance_sampling_level": "sequence"}
    ),
    "cispo": Surrogate(settings=("epsilon_high",), sets={"loss_type": "cispo"}),
    "sapo": Surrogate(settings=("sapo_temperature_pos", "sapo_temperature_neg"), sets={"loss_type": "sapo"}),
    "vespo": Surrogate(
        settings=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), sets={"loss_type": "vespo"}
    ),
    "none": Surrogate(),
}
