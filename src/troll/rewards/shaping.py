"""Optional rewards, added to a task's own: they shape how a model answers, and say nothing of what is right.

For length, TRL has `trl.rewards.get_soft_overlong_punishment`, DAPO's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from troll.rewards.answers import AnswerFormat, check_answer_format, final_answer
from troll.rewards.completion import Completion, completion_text


class FormatReward:
    """A reward in TRL's signature: 1.0 where a completion ends with an answer in the format asked for, else 0.0.

    Args:
        answer_format: How the final answer is to be marked: `boxed`, `hash` or `tag`.

    Raises:
        ValueError: If the format is unknown.
    """

    __name__ = "format"

    def __init__(self, answer_format: AnswerFormat = "boxed"):
        check_answer_format(answer_format)
        self.answer_format = answer_format

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        """B completions, plain or conversations, to B numbers."""
        return [float(final_answer(completion_text(each), self.answer_format) is not None) for each in completions]
