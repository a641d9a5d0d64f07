"""Graders, and their verdicts about completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Completion = str | list[dict[str, str]]

#: What TRL passes to every reward function next to the data set's columns. It would raise "multiple values for keyword
#: argument" in the first rollout, or silently pass its own value instead of a column of that name.
TAKEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def completion_text(completion: Completion) -> str:
    """Returns the text that the model wrote last.

    Args:
        completion: A completion in either of TRL's forms: a string; or a conversation, a list of messages with `role`
            and `content`. Only its last message counts, and only if it is the model's: with tools, a completion that
            reaches its length limit may end with the result of a tool, which is not an answer.
    """
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion[-1]["role"] == "assistant" else ""


def printable(text: str) -> str:
    """The text with a backslash escape for every character that a terminal or a file may not take."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


@dataclass(frozen=True)
class Verdict:
    """The judgement of one completion.

    Attributes:
        score: The share that is right, in [0, 1]; exactly 1.0 is a success. None if the completion could not be judged,
            for example for lack of memory or processes.
        answer: The final answer or the program that was read from the completion; None if it has none in the required
            form.
        reason: The reason for the score, in a few words, e.g. "correct", "wrong answer", "no answer", "time limit", and
            "unscored: ..." with the cause.
        cpu_seconds: CPU time of a program in all its tests. None if it was not measured, and for other kinds of
            answers. Verdicts that differ only in this field are equal.
    """

    score: float | None
    answer: str | None
    reason: str
    cpu_seconds: float | None = field(default=None, compare=False, repr=False)

    @property
    def success(self) -> bool:
        """Whether all of the completion is right."""
        return self.score == 1.0

    @property
    def reward(self) -> float | None:
        """1.0 for a success, 0.0 otherwise, and None where it could not be judged."""
        return None if self.score is None else float(self.success)


class Grader(ABC):
    """The base class of verifiable rewards with TRL's signature: 1.0 for a success, 0.0 otherwise, None if not judged.

    `TrollTrainer` leaves a completion that could not be judged out of the rollout, even if other reward functions score
    it. The method `grade` returns more than a number: the share that is right, the answer that was read, and the
    reason. A subclass defines `grade`.

    Attributes:
        votes: Whether answers can be compared, so that there can be a majority vote; False unless a subclass sets it.
        latest: The verdicts of the last call.
    """

    __name__ = "success"
    votes = False
    latest: Sequence[Verdict] = ()

    @abstractmethod
    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        """Judges completions.

        Args:
            completions: B texts, as the model wrote them.
            **columns: The data set's columns, B values each; columns that the grader does not read are ignored.

        Returns:
            B verdicts. Every completion gets one, with score None if the machine failed: a grader raises only for
            mistakes of its user.
        """

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers of completions count as one in a majority vote."""
        return first == second

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        """Rewards in TRL's signature: maps B completions, plain or conversations, to 0.0, 1.0 or None each."""
        self.latest = self.grade([completion_text(completion) for completion in completions], **columns)
        return [verdict.reward for verdict in self.latest]


def leaves_unscored(reward: object) -> bool:
    """Whether None from a reward function means that a completion could not be judged.

    It does for a `Grader`, and for a function whose attribute `grader` is one. None from any other function has TRL's
    meaning: the function does not apply to the completion.
    """
    return isinstance(getattr(reward, "grader", reward), Grader)


def clash(columns: Iterable[str], more: Iterable[str] = ()) -> str | None:
    """An error about columns whose names TRL uses for other arguments of reward functions; None if there are none.

    Args:
        columns: All names.
        more: Names that reward functions use for other arguments, in addition to `TAKEN`.
    """
    found = sorted({*TAKEN, *more}.intersection(columns))
    if not found:
        return None
    names = " and ".join(repr(name) for name in found)
    return (
        f"the data set cannot have a column named {names}: reward functions get an argument of that name from TRL. "
        f"Rename it (rename_column({found[0]!r}, ...) of datasets), or remove it (remove_columns)"
    )
