"""Rewards that can be checked: mathematical answers, programs by their tests, and the form of an answer.

`MathGrader` and `CodeGrader` are reward functions with TRL's signature. Their method `grade` returns more than a
number: the share that is right, the answer that was read, and the reason. Importing this package starts no process:
math-verify runs in processes that start with the first answer, and the code for programs, including `troll_sandbox`, is
imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from troll.grading import Grader, Verdict, completion_text
from troll_lab.rewards.answers import FormatReward, final_answer
from troll_lab.rewards.mathematics.grader import MathGrader

if TYPE_CHECKING:
    from troll_lab.rewards.code import CodeGrader, passed_fraction
    from troll_lab.rewards.program import parse_tests
    from troll_lab.rewards.speed import time_saved

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
    "CodeGrader": "troll_lab.rewards.code",
    "passed_fraction": "troll_lab.rewards.code",
    "parse_tests": "troll_lab.rewards.program",
    "time_saved": "troll_lab.rewards.speed",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_WHEN_NAMED[name]), name)
