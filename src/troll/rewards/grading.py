"""What a reward can say about a completion beyond its number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from troll.rewards.completion import Completion, completion_text


@dataclass(frozen=True)
class Verdict:
    """What became of one completion.

    Attributes:
        score: How much of it is right, in [0, 1]; exactly 1.0 is a success. None where it could not be judged, for lack
            of memory or processes for example, which says nothing about the completion.
        answer: What was read from it as the final answer, or as its program; None where there is none in the form asked
            for.
        reason: Why it scored so, in a few words, e.g. "correct", "wrong answer", "no answer", "time limit", and
            "unscored: ..." with the cause.
    """

    score: float | None
    answer: str | None
    reason: str

    @property
    def success(self) -> bool:
        """Whether all of it is right."""
        return self.score == 1.0

    @property
    def reward(self) -> float | None:
        """1.0 for a success, 0.0 otherwise, and None where it could not be judged."""
        return None if self.score is None else float(self.success)


class Grader(ABC):
    """A verifiable reward: called as TRL calls a reward function, it returns 1.0 for a success and 0.0 otherwise.

    A completion that could not be judged gets None. `TrollTrainer` leaves it out of the rollout, whatever other reward
    functions say of it.

    `grade` says more: the share that is right, the answer that was read, and why.
    """

    __name__ = "success"

    #: Whether answers can be compared, so that the most frequent one means something.
    votes = False

    #: The verdicts of the last call, for those who want to know more than its numbers.
    latest: Sequence[Verdict] = ()

    @abstractmethod
    def grade(self, completions: Sequence[str], **columns: Any) -> list[Verdict]:
        """Judges completions.

        Args:
            completions: B texts, as the model wrote them.
            **columns: The data set's columns, B values each; more than those read here may come.

        Returns:
            B verdicts. Any completion gets one, with score None if the machine failed: a grader raises for mistakes of
            its user only.
        """

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers of completions count as one in a majority vote."""
        return first == second

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        """Rewards in TRL's signature: B completions, plain or conversations, to B of 0.0, 1.0 and None."""
        self.latest = self.grade([completion_text(completion) for completion in completions], **columns)
        return [verdict.reward for verdict in self.latest]


def leaves_unscored(reward: object) -> bool:
    """Whether None from a reward function means that a completion could not be judged.

    It does of a `Grader`, and of a function whose attribute `grader` is one. None from any other function has TRL's
    meaning: the function has nothing to say about the completion.
    """
    return isinstance(getattr(reward, "grader", reward), Grader)
