"""Schedules of ε (`kl_bound`) over training, and bounds of single tokens: docs/bounds.md says when to use which."""

from troll.trust_region.bounds import Bound, BoundStatistics, make_bound
from troll.trust_region.token_bounds import by_advantage, entropy_scaled

__all__ = ["Bound", "BoundStatistics", "by_advantage", "entropy_scaled", "make_bound"]
