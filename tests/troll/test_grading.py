from typing import Any

import pytest

from troll_lab.rewards import FormatReward, MathGrader, completion_text

RIGHT = r"\boxed{18}"
ANSWER: dict[str, Any] = {"role": "assistant", "content": RIGHT}
CALL: dict[str, Any] = {"role": "assistant", "content": "I look it up.", "tool_calls": []}
FOUND: dict[str, Any] = {"role": "tool", "name": "search", "content": RIGHT}
PICTURE: dict[str, Any] = {"role": "tool", "name": "draw", "content": [{"type": "image", "image": None}]}


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (RIGHT, RIGHT),
        ([ANSWER], RIGHT),
        ([CALL, FOUND, ANSWER], RIGHT),
        ([ANSWER, CALL], "I look it up."),
        ([CALL, FOUND], ""),
        ([CALL, PICTURE], ""),
    ],
)
def test_completion_text_is_the_last_message_if_it_is_the_model_s(completion, text):
    assert completion_text(completion) == text
    assert MathGrader()([""], [completion], answer=["18"]) == [float(text == RIGHT)]
    assert FormatReward()([""], [completion]) == [float(text == RIGHT)]
