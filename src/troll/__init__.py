"""TROLL: trust regions instead of clipping for RL fine-tuning of language models (arXiv 2510.03817)."""

# ruff: noqa: E402 (the filter comes before the first import of torch)

import importlib
import importlib.metadata
import warnings
from typing import Any

# torch warns at its first import where NumPy is not installed, which nothing here needs. Not in a context that restores
# the filters: it would remove those that torch adds.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

from torch.serialization import add_safe_globals

from troll import diagnostics
from troll.trust_region.constraint import Constraint
from troll.trust_region.loss import troll_loss
from troll.trust_region.policy.on_support import PolicyOnSupport, sparse_entropy, sparse_kl
from troll.trust_region.policy.packed import PackedPolicy
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.policy.top import capture_top
from troll.trust_region.policy.truncation import Truncation
from troll.trust_region.projection import Projection, project
from troll.trust_region.rate import KLTarget
from troll.trust_region.reading.capture import capture
from troll.trust_region.reading.head import LMHead
from troll.trust_region.reading.logits import Logits
from troll.trust_region.reading.read import log_probs_at
from troll.trust_region.step import TrustRegionStep, trust_region_step

__all__ = [
    "Constraint",
    "KLTarget",
    "LMHead",
    "Logits",
    "PackedPolicy",
    "PolicyOnSupport",
    "Projection",
    "SparsePolicy",
    "Truncation",
    "TrustRegionStep",
    "capture",
    "capture_top",
    "diagnostics",
    "log_probs_at",
    "project",
    "sparse_entropy",
    "sparse_kl",
    "troll_loss",
    "trust_region_step",
]

# Lets `torch.load` with its default arguments read what `torch.save` wrote of these.
add_safe_globals(
    [Constraint, LMHead, Logits, PackedPolicy, PolicyOnSupport, Projection, SparsePolicy, Truncation, TrustRegionStep]
)
add_safe_globals([diagnostics.Tally])


def __getattr__(name: str) -> Any:
    # Not imported before it is named: it needs transformers.
    if name == "huggingface":
        return importlib.import_module("troll.huggingface")
    # Read when it is named: a checkout on the path has no version, and can be imported.
    if name == "__version__":
        try:
            return importlib.metadata.version("troll-rl")
        except importlib.metadata.PackageNotFoundError:
            raise AttributeError("troll has no __version__ here: its distribution troll-rl is not installed") from None
    raise AttributeError(f"module 'troll' has no attribute {name!r}")
