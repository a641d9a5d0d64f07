"""TROLL: trust regions instead of clipping for RL fine-tuning of language models (arXiv 2510.03817)."""

from troll.trust_region.objective import troll_loss, trust_region_log_probs, trust_region_log_probs_from_hidden
from troll.trust_region.policy import SparsePolicy
from troll.trust_region.projection import project

__all__ = [
    "SparsePolicy",
    "project",
    "troll_loss",
    "trust_region_log_probs",
    "trust_region_log_probs_from_hidden",
]
