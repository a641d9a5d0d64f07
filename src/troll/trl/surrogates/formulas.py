"""Surrogates that change the ratio or add a penalty. docs/surrogates.md has the formulas side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from troll.settings import number
from troll.trl.surrogates.terms import NoSettings, ScoredTokens, Terms
from troll.trust_region.policy.truncation import kept_or_not
from troll.trust_region.probabilities import divergence
from troll.trust_region.step import Pull, common_outcomes, pull_to_old, trust_region_step


class ConfigFields(Protocol):
    """What the surrogates below read of the `TrollConfig`, whose module imports this one."""

    pull: Pull
    regression_weight: float


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
    """

    weight: float = number(1.0, "finite and above 0")
    direction: Literal["old_new", "new_old"] = "old_new"


def kl_penalty(tokens: ScoredTokens, args: ConfigFields, own: KLPenaltySettings) -> Terms:
    """The raw ratio, and the penalty β KL(p ‖ p̃) or β KL(p̃ ‖ p) (arXiv 1707.06347, eq. 8).

    The divergence is over the outcomes that TROLL projects: the old policy's support and its tail, floored; of a
    truncated policy the kept set, and in addition that set and its complement.
    """
    assert tokens.old is not None and tokens.new is not None
    pairs = [(tokens.new, tokens.old)] + ([kept_or_not(tokens.new, tokens.old)] if tokens.old.truncated else [])
    every = [common_outcomes(new, old) for new, old in pairs]
    if own.direction == "old_new":
        kls = [pull_to_old(x) for x in every]
    else:
        kls = [divergence(torch.where(x.present, x.new - x.old, 0.0), x.old) for x in every]
    return Terms(penalty=own.weight * torch.stack(kls).sum(0))
