"""Reads the final answer of a completion, in the format that its prompt requires."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from troll.grading import Completion, completion_text

AnswerFormat = Literal["boxed", "hash", "tag"]

# A command that opens a box, an escaped character, or a brace. Two backslashes are a line break; before `boxed`, they
# are a backslash that was escaped once too often.
_BOX_TOKEN = re.compile(r"\\boxed\s*\{|\\(?!\\boxed)[^b]|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_DISPLAY = re.compile(r"[ \t]*(?:\\\[|\$\$)[ \t]*\n(.{0,2000}?)\n[ \t]*(?:\\\]|\$\$)", re.DOTALL)
_EMPHASIS = re.compile(r"(\*{1,3}|__?|`)(.+)\1(\.?)", re.DOTALL)
_TAG = re.compile(r"</?answer>")
_MATH = re.compile(r"(?:\$\$?|\\[(\[])(.*?)(?:\$\$?|\\[)\]])\.?", re.DOTALL)


def _boxed(text: str) -> str | None:
    last = None
    opened: list[int | None] = []  # for each open brace, where its box's content starts; None for a group
    for token in _BOX_TOKEN.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = slice(start, token.start())
    return None if last is None else text[last]


def _after_hashes(text: str) -> str | None:
    *_, last = None, *_HASHES.finditer(text)
    if last is None:
        return None
    display = _DISPLAY.match(text, last.end())
    answer = (display[1] if display else text[last.end() :].partition("\n")[0]).strip()
    if text[: last.start()].endswith("*"):  # `**#### 42**`
        return answer.rstrip("*")
    return _plain(answer)


def _plain(answer: str) -> str:
    emphasis = _EMPHASIS.fullmatch(answer)
    return emphasis[2] + emphasis[3] if emphasis else answer


def _tagged_plainly(text: str) -> str | None:
    answer = tagged(text)
    return None if answer is None else _plain(answer.strip())


def tagged(text: str) -> str | None:
    """The text in the last `<answer></answer>`; None if there is none."""
    last, start = None, None
    for tag in _TAG.finditer(text):
        if tag[0] == "<answer>":
            start = tag.end()
        elif start is not None:
            last, start = slice(start, tag.start()), None
    return None if last is None else text[last]


@dataclass(frozen=True)
class _Format:
    instruction: str
    mark: str
    read: Callable[[str], str | None]


_FORMATS: dict[AnswerFormat, _Format] = {
    "boxed": _Format(r"Reason step by step, and put the final answer in \boxed{}.", r"\boxed{%s}", _boxed),
    "hash": _Format(
        'Reason step by step, and end with a line "#### " followed by the final answer alone.', "#### %s", _after_hashes
    ),
    "tag": _Format(
        "Reason step by step, and put the final answer in <answer></answer>.", "<answer>%s</answer>", _tagged_plainly
    ),
}

#: The sentence that asks for a final answer in each format.
INSTRUCTIONS: dict[AnswerFormat, str] = {name: entry.instruction for name, entry in _FORMATS.items()}


def check_answer_format(answer_format: str) -> None:
    """Raises ValueError for an unknown format."""
    if answer_format not in _FORMATS:
        raise ValueError(f"answer_format must be one of {', '.join(_FORMATS)}, got {answer_format!r}")


def marked(answer: str, answer_format: AnswerFormat = "boxed") -> str:
    """Returns an answer in the format of a completion, from which `final_answer` reads it."""
    check_answer_format(answer_format)
    return _FORMATS[answer_format].mark % answer


def final_answer(text: str, answer_format: AnswerFormat = "boxed") -> str | None:
    r"""Reads the last complete answer in the given format from a text, in time linear in the text.

    - `boxed`: the content of `\boxed{...}` with its braces balanced. Of nested boxes the outermost counts.
    - `hash`: the text after `####` on its line, without emphasis (`#### **42**`), or the display that starts there.
    - `tag`: the text between `<answer>` and `</answer>`, without emphasis.

    In every format, an answer that is only a box, in `$` or not, counts as the content of that box.

    Args:
        text: The text of a completion.
        answer_format: How the answer is marked: `boxed`, `hash` or `tag`.

    Returns:
        The answer without the space around it; None where there is none, or where the last one is empty.

    Raises:
        ValueError: If the format is unknown.
    """
    check_answer_format(answer_format)
    answer = _FORMATS[answer_format].read(text)
    if answer is None:
        return None
    return _unwrapped(answer.strip()) or None


def _unwrapped(answer: str) -> str:
    if r"\boxed" not in answer:
        return answer
    math = _MATH.fullmatch(answer)
    box = (math[1] if math else answer).strip()
    content = _boxed(box)
    if content is not None and re.fullmatch(r"\\boxed\s*\{", box[: len(box) - len(content) - 1]):
        return content.strip()
    return answer


class FormatReward:
    """A reward with TRL's signature: 1.0 for a completion with an answer in the required format, else 0.0.

    It is added to a task's own rewards: it shapes the form of an answer, and does not judge the answer.

    Args:
        answer_format: How the final answer has to be marked: `boxed`, `hash` or `tag`.

    Raises:
        ValueError: If the format is unknown.
    """

    __name__ = "format"

    def __init__(self, answer_format: AnswerFormat = "boxed"):
        check_answer_format(answer_format)
        self.answer_format = answer_format

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        """Maps B completions, plain or conversations, to B numbers."""
        return [float(final_answer(completion_text(each), self.answer_format) is not None) for each in completions]
