"""Rewards that can be checked: mathematical answers, programs by their tests, and the form of an answer.

`MathGrader` and `CodeGrader` are reward functions as TRL's trainers call them. `grade` says more than their number: how
much is right, what was read as the answer, and why. Importing this starts nothing: math-verify works in processes that
start with the first answer, and what concerns programs, `troll_sandbox` with it, is imported when it is first named.
"""

import importlib
from typing import TYPE_CHECKING, Any

from troll.rewards.answers import FormatReward, final_answer
from troll.rewards.grading import Grader, Verdict, completion_text
from troll.rewards.mathematics.grader import MathGrader

if TYPE_CHECKING:
    from troll.rewards.code import CodeGrader, passed_fraction
    from troll.rewards.program import parse_tests
    from troll.rewards.speed import time_saved

__all__ = [
    "CodeGrader",
    "FormatReward",
    "Grader",
    "MathGrader",
    "Verdict",
    "completion_text",
    "final_answer",
    "parse_tests",
    "passed_fraction",
    "time_saved",
]

_IMPORTED_WHEN_NAMED = {
    "CodeGrader": "troll.rewards.code",
    "passed_fraction": "troll.rewards.code",
    "parse_tests": "troll.rewards.program",
    "time_saved": "troll.rewards.speed",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_WHEN_NAMED[name]), name)
