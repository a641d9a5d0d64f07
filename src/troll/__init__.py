"""TROLL: trust regions instead of clipping for RL fine-tuning of language models (arXiv 2510.03817)."""

import importlib
from types import ModuleType

from torch.serialization import add_safe_globals

from troll.trust_region.bounds import BOUNDS, Bound, BoundStatistics, make_bound
from troll.trust_region.bounds.per_token import by_advantage, entropy_scaled
from troll.trust_region.coverage import coverage, support_too_small
from troll.trust_region.diagnostics import (
    dual_report,
    old_to_new_kl,
    ratio_report,
    sequence_report,
    tail_gap,
    tail_report,
)
from troll.trust_region.objective import troll_loss, trust_region_step
from troll.trust_region.policy.outcomes import Outcomes, sparse_entropy, sparse_kl
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.top import capture_top
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.projection import Projection, project
from troll.trust_region.projecting.step import TrustRegionStep
from troll.trust_region.reading.capture import capture
from troll.trust_region.reading.head import LMHead
from troll.trust_region.reading.logits import Logits
from troll.trust_region.reading.read import log_probs_at
from troll.trust_region.tally import Tally

__all__ = [
    "Bound",
    "BoundStatistics",
    "Constraint",
    "LMHead",
    "Logits",
    "Outcomes",
    "PackedPolicy",
    "Projection",
    "SparsePolicy",
    "Tally",
    "TrustRegionStep",
    "by_advantage",
    "capture",
    "capture_top",
    "coverage",
    "dual_report",
    "entropy_scaled",
    "log_probs_at",
    "make_bound",
    "old_to_new_kl",
    "project",
    "ratio_report",
    "sequence_report",
    "sparse_entropy",
    "sparse_kl",
    "support_too_small",
    "tail_gap",
    "tail_report",
    "troll_loss",
    "trust_region_step",
]

# `torch.load` with its default arguments reads what `torch.save` wrote of these.
add_safe_globals([Constraint, LMHead, Logits, Outcomes, PackedPolicy, Projection, SparsePolicy, TrustRegionStep])
add_safe_globals([BoundStatistics, Tally, *BOUNDS.values()])


def __getattr__(name: str) -> ModuleType:
    # Not imported before it is named: it needs transformers.
    if name == "huggingface":
        return importlib.import_module("troll.huggingface")
    raise AttributeError(f"module 'troll' has no attribute {name!r}")
