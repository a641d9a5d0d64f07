"""The surrogates as functions of the scored tokens. docs/surrogates.md has the formulas side by side."""

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
from troll.trust_region.probabilities import divergence, floored
from troll.trust_region.step import common_outcomes, pull_to_old, trust_region_step


def troll(tokens: ScoredTokens, args: ConfigFields, own: NoSettings) -> Terms:
    """TROLL (arXiv 2510.03817): the projected policy's ratio q(o)/p(o), and the pull α KL(p̃ ‖ ⌊q⌋) or α KL(p ‖ p̃)."""
    assert tokens.old is not None and tokens.new is not None
    step = trust_region_step(
        tokens.new,
        tokens.old,
        tokens.kl_bound,
        tail=args.tail,
        solver=args.solver,
        constraint=tokens.constraint,
        pull=args.pull,
    )
    return Terms(
        log_ratio=step.log_ratio,
        penalty=tokens.penalty_weight * step.regression,
        penalised_kl=step.regression.detach(),
        step=step,
    )


def regression(tokens: ScoredTokens, args: ConfigFields, own: NoSettings) -> Terms:
    """TROLL's pull only, with the raw ratio p̃(o)/p(o)."""
    return dataclasses.replace(troll(tokens, args, own), log_ratio=None)


@dataclass(frozen=True)
class KLPenaltySettings:
    """The settings of "kl_penalty".

    Attributes:
        weight: β; with a `target`, its initial value.
        direction: What is penalised: "old_new", KL(p ‖ p̃), as PPO does; or "new_old", KL(p̃ ‖ p).
        target: d, the mean KL (nats) to which β adapts: after each rollout it is halved where the mean KL of the
            rollout's last update was below d/1.5, and doubled where it was above 1.5 d, at most 1024 times larger or
            smaller than `weight`. An update must not take passes over two rollouts. None keeps β.
        clip: ε of PPO's clip, which also limits each token's ratio; from 1 on, it has no lower end. None clips nothing.
        cap: c > 1, the largest ratio: min(r, c) for the ratio r with either sign of the advantage, so that a token
            above it has no policy gradient. None caps nothing.
    """

    weight: float = number(1.0, "finite and above 0")
    direction: Literal["old_new", "new_old"] = "old_new"
    target: float | None = number(None, "finite and above 0")
    clip: float | None = number(None, "finite and above 0")
    cap: float | None = number(None, "above 1")


def kl_penalty(tokens: ScoredTokens, args: ConfigFields, own: KLPenaltySettings) -> Terms:
    """The raw ratio, and the penalty β KL(p ‖ p̃) or β KL(p̃ ‖ p) (arXiv 1707.06347, eq. 8).

    The divergence is over the outcomes that TROLL projects: the old policy's support and its tail, floored; of a
    truncated policy the kept set, and in addition that set and its complement. The ratio may have a clip and a cap.
    """
    assert tokens.old is not None and tokens.new is not None
    pairs = [(tokens.new, tokens.old)] + ([kept_or_not(tokens.new, tokens.old)] if tokens.old.truncated else [])
    every = [common_outcomes(new, old, args.tail) for new, old in pairs]
    if own.direction == "old_new":
        kls = [pull_to_old(x) for x in every]
    else:
        kls = [divergence(torch.where(x.present, x.new - x.old, 0.0), x.old) for x in every]
    kl = torch.stack(kls).sum(0)
    limited = own.clip is not None or own.cap is not None
    return Terms(
        log_ratio=limited_log_ratio(tokens, own.clip, own.cap) if limited else None,
        penalty=tokens.penalty_weight * kl,
        penalised_kl=kl.detach(),
    )


def limited_log_ratio(tokens: ScoredTokens, clip: float | None, cap: float | None) -> Tensor:
    """The raw log ratio within PPO's clip and below a cap, (N,), without gradient where either holds it.

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
    """GMPO (arXiv 2507.20673): clips log ratios that the advantage pushes out; TRL takes a sequence's mean."""
    log_ratio, bound = tokens.log_ratio, own.range
    return Terms(log_ratio=torch.where(tokens.advantages > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound)))


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
