"""Rewards that can be checked: mathematical answers, programs by their tests, and the form of an answer.

`MathGrader` and `CodeGrader` are reward functions as TRL's trainers call them. `grade` says more than their number: how
much is right, what was read as the answer, and why. math-verify is not imported here, nor by a grader: it works in
processes of its own.
"""

from troll.rewards.answers import FormatReward, final_answer
from troll.rewards.code import CodeGrader, passed_fraction
from troll.rewards.grading import Grader, Verdict, completion_text
from troll.rewards.mathematics.grader import MathGrader
from troll.rewards.program import CodeTests, FunctionTests, StreamTests, parse_tests
from troll.rewards.sandbox.launch import SandboxError
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.protocol import Sandbox

__all__ = [
    "CodeGrader",
    "CodeTests",
    "FormatReward",
    "FunctionTests",
    "Grader",
    "Limits",
    "MathGrader",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "StreamTests",
    "Verdict",
    "completion_text",
    "final_answer",
    "parse_tests",
    "passed_fraction",
]
