"""Surrogates that change the ratio or add a penalty. docs/surrogates.md has the formulas side by side."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from troll.trl.own_settings import number
from troll.trl.surrogates.terms import ConfigFields, NoSettings, ScoredTokens, Terms
from troll.trust_region.policy.truncation import kept_or_not
from troll.trust_region.probabilities import divergence
from troll.trust_region.step import common_outcomes, pull_to_old, trust_region_step


def troll(tokens: ScoredTokens, args: ConfigFields, own: NoSettings) -> Terms:
    """TROLL (arXiv 2510.03817): the projected policy's ratio q(o)/p(o), and the pull α KL(p̃ ‖ ⌊q⌋) or α KL(p ‖ p̃)."""
    assert tokens.old is not None and tokens.new is not None
    step = trust_region_step(tokens.new, tokens.old, tokens.kl_bound, constraint=tokens.constraint, pull=args.pull)
    return Terms(log_ratio=step.log_ratio, penalty=args.regression_weight * step.regression, step=step)


def regression(tokens: ScoredTokens, args: ConfigFields, own: NoSettings) -> Terms:
    """TROLL's pull only, with the raw ratio p̃(o)/p(o)."""
    return dataclasses.replace(troll(tokens, args, own), log_ratio=None)


@dataclass(frozen=True)
class KLPenaltySettings:
    """The settings of "kl_penalty".

    Attributes:
        weight: β.
        direction: The divergence of the penalty: "old_new", KL(p ‖ p̃), as in PPO; or "new_old", KL(p̃ ‖ p).
        clip: ε of PPO's clip, which limits each token's ratio in addition; from 1 on without a lower end. None: no
            clip.
        cap: c > 1, the largest ratio: min(r, c) for the ratio r with either sign of the advantage, so that a token
            above it has no policy gradient. None: no cap.
    """

    weight: float = number(1.0, "finite and above 0")
    direction: Literal["old_new", "new_old"] = "old_new"
    clip: float | None = number(None, "finite and above 0")
    cap: float | None = number(None, "above 1")


def kl_penalty(tokens: ScoredTokens, args: ConfigFields, own: KLPenaltySettings) -> Terms:
    """The raw ratio, and the penalty β KL(p ‖ p̃) or β KL(p̃ ‖ p) (arXiv 1707.06347, eq. 8).

    The divergence is over the outcomes that TROLL projects: the old policy's support and its tail, floored; of a
    truncated policy the kept set, and in addition that set and its complement. The ratio may have a clip and a cap.
    """
    assert tokens.old is not None and tokens.new is not None
    pairs = [(tokens.new, tokens.old)] + ([kept_or_not(tokens.new, tokens.old)] if tokens.old.truncated else [])
    every = [common_outcomes(new, old) for new, old in pairs]
    if own.direction == "old_new":
        kls = [pull_to_old(x) for x in every]
    else:
        kls = [divergence(torch.where(x.present, x.new - x.old, 0.0), x.old) for x in every]
    kl = torch.stack(kls).sum(0)
    limited = own.clip is not None or own.cap is not None
    return Terms(
        log_ratio=limited_log_ratio(tokens, own.clip, own.cap) if limited else None,
        penalty=own.weight * kl,
    )


def limited_log_ratio(tokens: ScoredTokens, clip: float | None, cap: float | None) -> Tensor:
    """The raw log ratio limited by PPO's clip and by a cap, (N,), without gradient where it is limited.

    Args:
        tokens: The tokens, (N,).
        clip: ε: `−A r` becomes `−min(A r, A clip(r, 1 − ε, 1 + ε))`, from 1 on without a lower end; None clips nothing.
        cap: c: r becomes `min(r, c)`, with either sign of the advantage; None caps nothing.
    """
    log_ratio = tokens.log_ratio
    if clip is not None:
        low = math.log1p(-clip) if clip < 1 else -math.inf
        clipped = log_ratio.clamp(max=math.log1p(clip)), log_ratio.clamp(min=low)
        log_ratio = torch.where(tokens.advantages > 0, *clipped)
    return log_ratio if cap is None else log_ratio.clamp(max=math.log(cap))


@dataclass(frozen=True)
class DRPOSettings:
    """The settings of "drpo".

    Attributes:
        threshold: ε: a token's gradient has the weight 1 − sign(A)(p̃(o) − p(o))/ε.
    """

    threshold: float = number(12.5, "finite and above 0")


def drpo(tokens: ScoredTokens, args: ConfigFields, own: DRPOSettings) -> Terms:
    """DRPO (arXiv 2606.09821): the loss `−A r + |A| p(o) (r − 1)² / 2ε` with the raw ratio r, with both gradients."""
    growth = torch.expm1(tokens.log_ratio)
    moved = tokens.old_log_probs.exp() * growth  # p̃(o) − p(o); by itself (r − 1)² could overflow
    return Terms(penalty=tokens.advantages.abs() * moved * growth / (2 * own.threshold))


@dataclass(frozen=True)
class GMPOSettings:
    """The settings of "gmpo".

    Attributes:
        range: The largest absolute log ratio of a token.
    """

    range: float = number(0.4, "finite and above 0")


def gmpo(tokens: ScoredTokens, args: ConfigFields, own: GMPOSettings) -> Terms:
    """GMPO (arXiv 2507.20673): clips log ratios in the direction of the advantage; TRL averages over a sequence."""
    log_ratio, bound = tokens.log_ratio, own.range
    return Terms(log_ratio=torch.where(tokens.advantages > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound)))
