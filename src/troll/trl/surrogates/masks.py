"""Surrogates that drop tokens: the ratio stays raw, and a dropped token has no policy term.

A dropped token keeps its place in the normalisation of the loss. docs/surrogates.md has the formulas side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from troll.trl.own_settings import number
from troll.trl.surrogates.terms import ConfigFields, ScoredTokens, Terms
from troll.trust_region.probabilities import divergence, floored
from troll.trust_region.step import common_outcomes


@dataclass(frozen=True)
class DPPOTVSettings:
    """The settings of "dppo_tv".

    Attributes:
        threshold: δ, the total variation above which a token is dropped.
        outcomes: The outcomes on which it is measured: "binary", the sampled token and the rest; or "top_k",
            `support_top_k` tokens and the rest.
    """

    threshold: float = number(0.15, "in (0, 1]")
    outcomes: Literal["binary", "top_k"] = "binary"


@dataclass(frozen=True)
class DPPOKLSettings:
    """The settings of "dppo_kl".

    Attributes:
        threshold: δ, the KL divergence (nats) above which a token is dropped.
        outcomes: The outcomes on which it is measured, as for "dppo_tv".
    """

    threshold: float = number(0.05, "finite and above 0")
    outcomes: Literal["binary", "top_k"] = "binary"


def dppo_tv(tokens: ScoredTokens, args: ConfigFields, own: DPPOTVSettings) -> Terms:
    """DPPO's mask by total variation (arXiv 2602.04879): `½ Σ |p̃ − p|` over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args, own.outcomes)
    variation = 0.5 * (new.exp() - old.exp()).abs().sum(-1)
    return _mask(tokens, variation > own.threshold)


def dppo_kl(tokens: ScoredTokens, args: ConfigFields, own: DPPOKLSettings) -> Terms:
    """DPPO's mask by KL(p ‖ p̃) (arXiv 2602.04879) over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args, own.outcomes)
    kl = divergence((old - new).masked_fill(new == -torch.inf, 0.0), new)
    return _mask(tokens, kl > own.threshold)


@dataclass(frozen=True)
class IPOSettings:
    """The settings of "ipo".

    Attributes:
        threshold: The change of a token's probability above which it is dropped.
        kl_weight: λ, the weight of (log ratio)² in the loss.
    """

    threshold: float = number(0.3, "in (0, 1]")
    kl_weight: float = number(0.0, "finite and at least 0")


def ipo(tokens: ScoredTokens, args: ConfigFields, own: IPOSettings) -> Terms:
    """prime-rl's IPO: drops tokens with `|p̃(o) − p(o)|` above the threshold, and adds the penalty λ (log r)²."""
    moved = tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()
    # Where λ is 0, an infinite log ratio must not make NaN.
    penalty = own.kl_weight * tokens.log_ratio.square() if own.kl_weight else None
    return Terms(keep=moved.abs() <= own.threshold, penalty=penalty)


def _outcomes(tokens: ScoredTokens, args: ConfigFields, outcomes: str) -> tuple[Tensor, Tensor]:
    """Both policies' floored log-probabilities: of the sampled token and the rest, or of the top K and the tail."""
    if outcomes == "top_k":
        assert tokens.old is not None and tokens.new is not None
        new, old, _ = common_outcomes(tokens.new, tokens.old, args.tail)
        return new.detach(), old
    return _sampled_or_not(tokens.new_log_probs.detach()), _sampled_or_not(tokens.old_log_probs)


def _sampled_or_not(log_probs: Tensor) -> Tensor:
    # Rounding lets a log-probability rise above 0 by an ulp.
    log_probs = log_probs.clamp(max=0.0)
    outcomes = torch.stack([log_probs, torch.log(-torch.expm1(log_probs))], -1)
    return floored(outcomes, torch.ones_like(outcomes, dtype=torch.bool))


def _mask(tokens: ScoredTokens, far: Tensor) -> Terms:
    """Drops the tokens that are `far` from the old policy and that the gradient would move further away."""
    log_ratio = tokens.log_ratio.detach()
    leaving = torch.where(tokens.advantages > 0, log_ratio > 0, log_ratio < 0)
    return Terms(keep=~(leaving & far))
