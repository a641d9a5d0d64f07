"""Evaluating a model on tasks: the command `troll eval`, and the estimates that it reports.

The estimates need no extra. The other names are imported when they are first used: they need the extras `trl` and
`tasks`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from troll_lab.evaluation.estimators import clustered_interval, majority_vote, pass_at_k, wilson_interval

if TYPE_CHECKING:
    from troll_lab.evaluation.config import EvaluationConfig, EvaluationError
    from troll_lab.evaluation.run import evaluate

__all__ = [
    "EvaluationConfig",
    "EvaluationError",
    "clustered_interval",
    "evaluate",
    "majority_vote",
    "pass_at_k",
    "wilson_interval",
]

_IMPORTED_WHEN_NAMED = {"EvaluationConfig": "config", "EvaluationError": "config", "evaluate": "run"}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_IMPORTED_WHEN_NAMED[name]}"), name)
