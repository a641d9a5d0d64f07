"""Surrogates on whole distributions: TROLL, its pull by itself, and a KL penalty."""

from __future__ import annotations

import torch

from troll.trl.surrogates.terms import ScoredTokens, Settings, Terms
from troll.trust_region.objective import trust_region_step
from troll.trust_region.policy.values import divergence
from troll.trust_region.projecting.step import common_outcomes


def troll(tokens: ScoredTokens, args: Settings) -> Terms:
    """The projected policy's ratio q(o)/p(o), and α KL(p̃ ‖ ⌊q⌋) (arXiv 2510.03817)."""
    assert tokens.old is not None
    assert tokens.new is not None
    step = trust_region_step(
        tokens.new, tokens.old, tokens.kl_bound, tail=args.tail, solver=args.solver, constraint=tokens.constraint
    )
    return Terms(log_ratio=step.log_ratio, penalty=args.regression_weight * step.regression, step=step)


def regression(tokens: ScoredTokens, args: Settings) -> Terms:
    """TROLL's pull only: the raw ratio p̃(o)/p(o), and α KL(p̃ ‖ ⌊q⌋)."""
    terms = troll(tokens, args)
    return Terms(penalty=terms.penalty, step=terms.step)


def kl_penalty(tokens: ScoredTokens, args: Settings) -> Terms:
    """The raw ratio, and β KL(p ‖ p̃), or β KL(p̃ ‖ p) (arXiv 1707.06347, eq. 8).

    The divergence is that of the outcomes that TROLL projects: the old policy's support and its tail, floored.
    """
    assert tokens.old is not None
    assert tokens.new is not None
    new, old, present = common_outcomes(tokens.new, tokens.old, args.tail)
    difference = torch.where(present, new - old, 0.0)
    kl = divergence(-difference, new) if args.kl_penalty_direction == "old_new" else divergence(difference, old)
    return Terms(penalty=tokens.kl_penalty_weight * kl, penalised_kl=kl.detach())
