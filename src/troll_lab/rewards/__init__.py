"""Rewards that can be checked: mathematical answers, programs by their tests, and the form of an answer.

`MathGrader` and `CodeGrader` are reward functions with TRL's signature. Their method `grade` returns more than a
number: the score, the answer that was read, and the reason. Importing this package starts no process and
loads nothing: each name is imported when it is first used. So the processes that compare mathematical answers, whose
code is in this package too, need not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll.grading import Grader, Verdict, completion_text
    from troll_lab.rewards.answers import FormatReward, final_answer
    from troll_lab.rewards.code import CodeGrader, passed_fraction
    from troll_lab.rewards.mathematics.grader import MathGrader
    from troll_lab.rewards.speed import time_saved
    from troll_lab.rewards.tests import parse_tests

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

_MODULES = {
    "CodeGrader": "troll_lab.rewards.code",
    "FormatReward": "troll_lab.rewards.answers",
    "Grader": "troll.grading",
    "MathGrader": "troll_lab.rewards.mathematics.grader",
    "Verdict": "troll.grading",
    "completion_text": "troll.grading",
    "final_answer": "troll_lab.rewards.answers",
    "parse_tests": "troll_lab.rewards.tests",
    "passed_fraction": "troll_lab.rewards.code",
    "time_saved": "troll_lab.rewards.speed",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
