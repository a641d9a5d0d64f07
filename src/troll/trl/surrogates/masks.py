"""Surrogates that drop tokens which are far from the old policy: DPPO and IPO."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.trl.surrogates.terms import ScoredTokens, Settings, Terms
from troll.trust_region.policy.values import divergence, floored
from troll.trust_region.projecting.step import common_outcomes


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


def ipo(tokens: ScoredTokens, args: Settings) -> Terms:
    """prime-rl's IPO: drops tokens with ``|p̃(o) − p(o)|`` above the threshold, in either direction; and λ (log r)²."""
    moved = tokens.new_log_probs.detach().exp() - tokens.old_log_probs.exp()
    # Where λ is 0, an infinite log ratio must not make NaN.
    penalty = args.ipo_kl_weight * tokens.log_ratio.square() if args.ipo_kl_weight else None
    return Terms(keep=moved.abs() <= args.ipo_threshold, penalty=penalty)


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
    log_ratio = tokens.log_ratio.detach()
    leaving = torch.where(tokens.advantages > 0, log_ratio > 0, log_ratio < 0)
    return Terms(keep=~(leaving & far))
