"""Surrogates of the sampled tokens' ratios: DRPO and GMPO."""

from __future__ import annotations

import torch

from troll.trl.surrogates.terms import ScoredTokens, Settings, Terms


def drpo(tokens: ScoredTokens, args: Settings) -> Terms:
    """DRPO (arXiv 2606.09821): ``−A r + |A| p(o) (r − 1)² / 2ε`` with the raw ratio r, differentiable in both terms."""
    growth = torch.expm1(tokens.log_ratio)
    moved = tokens.old_log_probs.exp() * growth  # p̃(o) − p(o); by itself (r − 1)² could overflow
    return Terms(penalty=tokens.advantages.abs() * moved * growth / (2 * args.drpo_threshold))


def gmpo(tokens: ScoredTokens, args: Settings) -> Terms:
    """GMPO (arXiv 2507.20673): log ratios, clipped where the advantage pushes them out; TRL takes a sequence's mean."""
    log_ratio, bound = tokens.log_ratio, args.gmpo_range
    return Terms(log_ratio=torch.where(tokens.advantages > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound)))
