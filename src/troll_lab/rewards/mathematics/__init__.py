"""Rewards for mathematical answers; verl finds `compute_score` here."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll_lab.rewards.mathematics.grader import MathGrader, compute_score, success

__all__ = ["MathGrader", "compute_score", "success"]


def __getattr__(name: str) -> Any:
    # Not imported before it is named: the processes that compare answers import this package too, without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("troll_lab.rewards.mathematics.grader"), name)
