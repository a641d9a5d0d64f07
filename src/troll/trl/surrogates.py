"""The surrogate: what keeps an update near the old policy. TROLL's projection, and its rivals.

To add one, write a function from `ScoredTokens` to `Terms` and register it in `SURROGATES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from troll.trust_region.objective import trust_region_step
from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.policy.values import divergence, floored
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.step import TrustRegionStep, common_outcomes


class Settings(Protocol):
    """What surrogates read of a `TrollConfig`."""

    @property
    def regression_weight(self) -> float:
        """α, the weight of the regression term."""

    @property
    def tail(self) -> Tail:
        """What happens to the outcomes outside of the support."""

    @property
    def solver(self) -> str:
        """How the multiplier of a token is found."""

    @property
    def divergence_threshold(self) -> float:
        """δ of the DPPO masks."""

    @property
    def dppo_outcomes(self) -> str:
        """What DPPO measures the divergence on: "binary" or "top_k"."""


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a micro-batch, each (N,), in both policies.

    Attributes:
        new_log_probs: log p̃ of the sampled tokens, differentiable.
        old_log_probs: log p of them.
        advantages: Of each token.
        kl_bound: ε; a float or (N,).
        constraint: Which tokens share a multiplier; None if each has its own.
        old: The old policy; None where the surrogate does not read policies.
        new: The new policy, read where the step takes it, differentiable; None as `old`.
    """

    new_log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    kl_bound: float | Tensor
    constraint: Constraint | None
    old: SparsePolicy | None
    new: Outcomes | None


@dataclass(frozen=True)
class Terms:
    """What a surrogate changes in ``−exp(log ratio) · A``, each (N,); None changes nothing.

    Attributes:
        log_ratio: Stands in for log p̃(o)/p(o) in the ratio; differentiable.
        keep: Bool: the tokens whose policy term counts.
        penalty: Added to the loss of each token, with the policy term's normalisation; differentiable.
        step: What the trust region did.
    """

    log_ratio: Tensor | None = None
    keep: Tensor | None = None
    penalty: Tensor | None = None
    step: TrustRegionStep | None = None


@dataclass(frozen=True)
class Surrogate:
    """An entry of `SURROGATES`.

    Attributes:
        settings: The fields of `TrollConfig` that matter to this surrogate and not to all of them.
        terms: None leaves TRL's loss as it is.
        clips: Whether TRL's clip stays on.
        reads_policies: Whether the distributions are needed beside the sampled tokens' log-probabilities.
    """

    settings: tuple[str, ...] = ()
    terms: Callable[[ScoredTokens, Settings], Terms] | None = None
    clips: bool = False
    reads_policies: Callable[[Settings], bool] = lambda args: False


def troll(tokens: ScoredTokens, args: Settings) -> Terms:
    """The projected policy's ratio q(o)/p(o), and α KL(p̃ ‖ ⌊q⌋) (arXiv 2510.03817)."""
    assert tokens.old is not None
    assert tokens.new is not None
    step = trust_region_step(
        tokens.new, tokens.old, tokens.kl_bound, tail=args.tail, solver=args.solver, constraint=tokens.constraint
    )
    return Terms(log_ratio=step.log_ratio, penalty=args.regression_weight * step.regression, step=step)


def dppo_tv(tokens: ScoredTokens, args: Settings) -> Terms:
    """DPPO's mask by total variation (arXiv 2602.04879): ``½ Σ |p̃ − p|`` over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args)
    variation = 0.5 * (new.exp() - old.exp()).abs().sum(-1)
    return _mask(tokens, variation > args.divergence_threshold)


def dppo_kl(tokens: ScoredTokens, args: Settings) -> Terms:
    """DPPO's mask by KL(p ‖ p̃) (arXiv 2602.04879) over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args)
    kl = divergence((old - new).masked_fill(new == -torch.inf, 0.0), new)
    return _mask(tokens, kl > args.divergence_threshold)


def _outcomes(tokens: ScoredTokens, args: Settings) -> tuple[Tensor, Tensor]:
    """Both policies' floored log-probabilities: of the sampled token and the rest, or of the top K and the tail."""
    if args.dppo_outcomes == "top_k":
        assert tokens.old is not None
        assert tokens.new is not None
        new, old, _ = common_outcomes(tokens.new, tokens.old, args.tail)
        return new.detach(), old
    return _sampled_or_not(tokens.new_log_probs.detach()), _sampled_or_not(tokens.old_log_probs)


def _sampled_or_not(log_probs: Tensor) -> Tensor:
    # Rounding lets a log-probability rise above 0 by an ulp.
    log_probs = log_probs.clamp(max=0.0)
    outcomes = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], -1)
    return floored(outcomes, torch.ones_like(outcomes, dtype=torch.bool))


def _mask(tokens: ScoredTokens, far: Tensor) -> Terms:
    """Drops the tokens that are far from the old policy and that the gradient would move further away."""
    log_ratio = (tokens.new_log_probs - tokens.old_log_probs).detach()
    leaving = torch.where(tokens.advantages > 0, log_ratio > 0, log_ratio < 0)
    return Terms(keep=~(leaving & far))


_DPPO_SETTINGS = ("dppo_threshold", "dppo_outcomes", "tail", "support_top_k", "mass_threshold")

SURROGATES: dict[str, Surrogate] = {
    "troll": Surrogate(
        settings=(
            "kl_bound",
            "kl_bound_schedule",
            "kl_bound_schedule_kwargs",
            "kl_bound_entropy_exponent",
            "kl_bound_negative_ratio",
            "regression_weight",
            "tail",
            "solver",
            "support_top_k",
            "mass_threshold",
            "constraint",
            "constraint_reduction",
        ),
        terms=troll,
        reads_policies=lambda args: True,
    ),
    "clip": Surrogate(
        settings=(
            "epsilon",
            "epsilon_high",
            "delta",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        ),
        clips=True,
    ),
    "dppo_tv": Surrogate(
        settings=_DPPO_SETTINGS, terms=dppo_tv, reads_policies=lambda args: args.dppo_outcomes == "top_k"
    ),
    "dppo_kl": Surrogate(
        settings=_DPPO_SETTINGS, terms=dppo_kl, reads_policies=lambda args: args.dppo_outcomes == "top_k"
    ),
    "none": Surrogate(),
}
