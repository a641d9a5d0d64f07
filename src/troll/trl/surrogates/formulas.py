"""The surrogates: what each makes of the scored tokens. docs/surrogates.md has the formulas side by side."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from troll.trl.surrogates.terms import ScoredTokens, Settings, Terms
from troll.trust_region.objective import trust_region_step
from troll.trust_region.policy.values import divergence, floored
from troll.trust_region.projecting.pull import to_old
from troll.trust_region.projecting.step import common_outcomes


def troll(tokens: ScoredTokens, args: Settings) -> Terms:
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


def regression(tokens: ScoredTokens, args: Settings) -> Terms:
    """TROLL's pull only, with the raw ratio p̃(o)/p(o)."""
    return dataclasses.replace(troll(tokens, args), log_ratio=None)


def kl_penalty(tokens: ScoredTokens, args: Settings) -> Terms:
    """The raw ratio, and the penalty β KL(p ‖ p̃) or β KL(p̃ ‖ p) (arXiv 1707.06347, eq. 8).

    The divergence is over the outcomes that TROLL projects: the old policy's support and its tail, floored. A clip and
    a cap of the ratio are options.
    """
    assert tokens.old is not None and tokens.new is not None
    new, old, present = common_outcomes(tokens.new, tokens.old, args.tail)
    if args.kl_penalty_direction == "old_new":
        kl = to_old(new, old, present)
    else:
        kl = divergence(torch.where(present, new - old, 0.0), old)
    limited = args.kl_penalty_clip is not None or args.kl_penalty_cap is not None
    return Terms(
        log_ratio=limited_log_ratio(tokens, args.kl_penalty_clip, args.kl_penalty_cap) if limited else None,
        penalty=tokens.penalty_weight * kl,
        penalised_kl=kl.detach(),
    )


def limited_log_ratio(tokens: ScoredTokens, clip: float | None, cap: float | None) -> Tensor:
    """The raw log ratio within PPO's clip and below a cap, (N,), without gradient where either holds it.

    Args:
        tokens: The tokens, (N,).
        clip: ε: `−A r` becomes `−min(A r, A clip(r, 1 − ε, 1 + ε))`; from 1 on, there is no lower end. None clips
            nothing.
        cap: c: r becomes `min(r, c)`, with either sign of the advantage. None caps nothing.
    """
    log_ratio = tokens.log_ratio
    if clip is not None:
        low = math.log1p(-clip) if clip < 1 else -math.inf
        clipped = log_ratio.clamp(max=math.log1p(clip)), log_ratio.clamp(min=low)
        log_ratio = torch.where(tokens.advantages > 0, *clipped)
    return log_ratio if cap is None else log_ratio.clamp(max=math.log(cap))


def drpo(tokens: ScoredTokens, args: Settings) -> Terms:
    """DRPO (arXiv 2606.09821): the loss `−A r + |A| p(o) (r − 1)² / 2ε` with the raw ratio r, with both gradients."""
    growth = torch.expm1(tokens.log_ratio)
    moved = tokens.old_log_probs.exp() * growth  # p̃(o) − p(o); by itself (r − 1)² could overflow
    return Terms(penalty=tokens.advantages.abs() * moved * growth / (2 * args.drpo_threshold))


def gmpo(tokens: ScoredTokens, args: Settings) -> Terms:
    """GMPO (arXiv 2507.20673): clips log ratios that the advantage pushes out; TRL takes a sequence's mean."""
    log_ratio, bound = tokens.log_ratio, args.gmpo_range
    return Terms(log_ratio=torch.where(tokens.advantages > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound)))


def dppo_tv(tokens: ScoredTokens, args: Settings) -> Terms:
    """DPPO's mask by total variation (arXiv 2602.04879): `½ Σ |p̃ − p|` over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args)
    variation = 0.5 * (new.exp() - old.exp()).abs().sum(-1)
    return _mask(tokens, variation > args.divergence_threshold)


def dppo_kl(tokens: ScoredTokens, args: Settings) -> Terms:
    """DPPO's mask by KL(p ‖ p̃) (arXiv 2602.04879) over two outcomes, or over the top K."""
    new, old = _outcomes(tokens, args)
    kl = divergence((old - new).masked_fill(new == -torch.inf, 0.0), new)
    return _mask(tokens, kl > args.divergence_threshold)


def ipo(tokens: ScoredTokens, args: Settings) -> Terms:
    """prime-rl's IPO: drops tokens with `|p̃(o) − p(o)|` above the threshold, and adds the penalty λ (log r)²."""
    moved = tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()
    # Where λ is 0, an infinite log ratio must not make NaN.
    penalty = args.ipo_kl_weight * tokens.log_ratio.square() if args.ipo_kl_weight else None
    return Terms(keep=moved.abs() <= args.ipo_threshold, penalty=penalty)


def _outcomes(tokens: ScoredTokens, args: Settings) -> tuple[Tensor, Tensor]:
    """Both policies' floored log-probabilities: of the sampled token and the rest, or of the top K and the tail."""
    if args.dppo_outcomes == "top_k":
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
