"""Answers in several attempts, such as "11 wait 12 wait 12": their redundant tokens, and their length."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from troll.grading import completion_text
from troll_lab.tasks.registry import RewardFunc


def overthought(separator: str, right: str, wrong: str, seed: str) -> str:
    """One to five right attempts; every eighth text begins with a wrong one. A seed always gives the same text."""
    draw = random.Random(seed)
    return separator.join([wrong] * (draw.random() < 1 / 8) + [right] * draw.randint(1, 5))


def needed_length(text: str, separator: str, is_right: Callable[[str], bool]) -> int:
    """The characters of a text up to the end of its first right attempt; all of them if there is none."""
    length = 0
    for attempt in text.split(separator):
        length += len(attempt)
        if is_right(attempt.strip()):
            return length
        length += len(separator)
    return len(text)


def tokens_until(length: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of tokens whose text has at least `length` characters."""
    return bisect_left(range(len(ids)), length, key=lambda count: len(decode(ids[:count])))


class Redundant:
    """A reward of tokens: -1 for each redundant token, and 0 for the completion as a whole.

    Redundant tokens are those between the end of the first right attempt and the end of the text, if the last attempt
    is right. The end-of-sequence token is never redundant.

    Args:
        separator: The text between two attempts.
        is_right: Whether an attempt answers the question of a `question_id`.
    """

    __name__ = "redundant"

    def __init__(self, separator: str, is_right: Callable[[str, int], bool]) -> None:
        self._separator, self._is_right = separator, is_right

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """The rewards of B completions, all 0."""
        return [0.0] * len(completions)

    def of_tokens(
        self, completion_ids: Sequence[Sequence[int]], question_id: Sequence[int], tokenizer: Any, **columns: Any
    ) -> list[list[float] | None]:
        """The worth of each token; None for a completion whose last attempt is wrong."""

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        def worths(ids: Sequence[int], question: int) -> list[float] | None:
            text = decode(ids)
            if not self._is_right(text.split(self._separator)[-1].strip(), question):
                return None
            needed = needed_length(text, self._separator, lambda attempt: self._is_right(attempt, question))
            first, end = (tokens_until(length, ids, decode) for length in (needed, len(text)))
            return [-1.0 if first <= place < end else 0.0 for place in range(len(ids))]

        return [worths(ids, question) for ids, question in zip(completion_ids, question_id, strict=True)]


def attempt_rewards(separator: str, is_right: Callable[[str, int], bool]) -> list[RewardFunc]:
    """The rewards `success`, for a right last attempt, `redundant`, against redundant tokens, and `length`.

    The arguments are those of `Redundant`.
    """

    def success(prompts: list[Any], completions: list[Any], question_id: list[int], **columns: Any) -> list[float]:
        last = (completion_text(completion).split(separator)[-1].strip() for completion in completions)
        return [float(is_right(attempt, question)) for attempt, question in zip(last, question_id, strict=True)]

    def length(prompts: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [-float(len(ids)) for ids in completion_ids]

    return [success, Redundant(separator, is_right), length]
