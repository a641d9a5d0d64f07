"""Temporally-correlated episodic RL (TCE, arXiv 2401.11437): actions are whole movements, advantages are of segments.

The policy is a Gaussian over the weights of a movement primitive, updated within the trust regions of `troll.gaussian`.
These names need torch only; environments and `troll train` need the extra `episodic`.
"""

from troll_lab.episodic.objective import clip_loss, ratio_loss, trust_region_objective
from troll_lab.episodic.policy import MovementPolicy, sample, segment_log_prob
from troll_lab.episodic.prodmp import ProDMP
from troll_lab.episodic.segments import generalised_advantages, normalised, random_cuts, segment_advantages

__all__ = [
    "MovementPolicy",
    "ProDMP",
    "clip_loss",
    "generalised_advantages",
    "normalised",
    "random_cuts",
    "ratio_loss",
    "sample",
    "segment_advantages",
    "segment_log_prob",
    "trust_region_objective",
]
