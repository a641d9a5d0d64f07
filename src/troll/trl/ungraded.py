"""Leaves completions that a grader could not judge out of a rollout, even if other rewards score them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from troll.grading import Grader, leaves_unscored
from troll.trl.seam import loss_mask, restricted

#: Rollouts in a row in which a grader could judge nothing, after which training ends.
HOPELESS_ROLLOUTS = 3

_NO_REASON = "the grader does not say why"


class NothingJudgedError(RuntimeError):
    """Raised when a grader has judged nothing in three rollouts in a row; names the most frequent cause."""


class UngradedFilter:
    """Leaves out the completions of a rollout that could not be judged; every method runs on every process.

    In TRL, None from a reward function means that the function does not apply, and the other functions' rewards count:
    a completion that no sandbox could test would be rewarded only for its format. None from a `Grader` means that the
    score of the completion is unknown. Such a row gets no reward at all, so it is not in a baseline, and its tokens are
    not in the loss.

    Args:
        accelerator: Gathers verdicts from the trainer's processes.
        reward_funcs: The trainer's reward functions, graders among them.
        reward_weights: (F,), their weights; a grader of weight 0 is only logged.
    """

    def __init__(self, accelerator: Accelerator, reward_funcs: Sequence[Any], reward_weights: Tensor) -> None:
        self._accelerator = accelerator
        trained = [place for place, weight in enumerate(reward_weights.tolist()) if weight != 0]
        self._columns = [place for place in trained if leaves_unscored(reward_funcs[place])]
        found: list[Grader] = [getattr(reward_funcs[place], "grader", reward_funcs[place]) for place in self._columns]
        self._graders = list(dict.fromkeys(found))
        self._rows, self._trouble = torch.empty(0, dtype=torch.bool), False
        self._verdicts = Counter[tuple[int, bool, bool]]()  # by grader, whether there was an answer, and a score
        self._reasons = Counter[str]()
        self._troubled_rollouts = self._hopeless_rollouts = 0
        # Of the current update: its tokens in the loss, and whether a rollout of it had trouble.
        self._tokens: Tensor | int = 0
        self._in_doubt = False

    def rows(self, rewards: Tensor) -> Tensor:
        """(N,) bool: the rows of (N, F) rewards that could not be judged; NaN stands for None."""
        return rewards[:, self._columns].isnan().any(1)

    def excluded(self, rewards: Tensor) -> Tensor:
        """The (N, F) rewards, with NaN in all columns of the rows that could not be judged."""
        return rewards.masked_fill(self.rows(rewards).unsqueeze(1), torch.nan)

    def metrics(self, rewards: Tensor) -> dict[str, float]:
        """`rewards/unscored`, the share of rows that could not be judged; empty if no function is a grader."""
        return {"rewards/unscored": float(self.rows(rewards).float().mean())} if self._columns else {}

    # The rollout

    def observe(self, rewards: Tensor) -> None:
        """Records which rows of the final rollout of all processes could not be judged."""
        self._rows = self.rows(rewards)

    def count_verdicts(self) -> None:
        """Counts this process's verdicts and their reasons; call it once after each grading."""
        for place, grader in enumerate(self._graders):
            for verdict in grader.latest:
                self._verdicts[place, verdict.answer is not None, verdict.score is not None] += 1
                if verdict.score is None:
                    self._reasons[verdict.reason.removeprefix("unscored: ")] += 1

    def without(self, rolled_out: dict[str, Any], of_rows: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """This process's part of the rollout, in which rows that could not be judged have no token in the loss.

        Warns about such rows, at growing intervals.

        Args:
            rolled_out: This process's rollout.
            of_rows: Takes this process's rows of values of all completions, as `TrollTrainer.of_rows`.

        Raises:
            NothingJudgedError: If a grader could judge nothing in this rollout and the two before.
        """
        self._trouble = bool(self._rows.any())
        self._count_rollout()
        if not self._trouble:
            return rolled_out
        return restricted(self._accelerator, rolled_out, ~of_rows(self._rows).unsqueeze(1))

    def _count_rollout(self) -> None:
        verdicts, reasons = self._verdicts, self._reasons
        self._verdicts, self._reasons = Counter(), Counter()
        if not self._trouble:
            self._hopeless_rollouts = 0
            return
        found = gather_object([(verdicts, reasons)])
        (reason, _), *_ = sum((each for _, each in found), Counter[str]()).most_common(1) or [(_NO_REASON, 0)]
        total = sum((counts for counts, _ in found), Counter[tuple[int, bool, bool]]())
        hopeless = self._rows.all() or any(_judges_nothing(total, place) for place in range(len(self._graders)))
        self._troubled_rollouts += 1
        self._hopeless_rollouts = self._hopeless_rollouts + 1 if hopeless else 0
        if self._hopeless_rollouts == HOPELESS_ROLLOUTS:
            self._hopeless_rollouts = 0  # training may go on in this process
            raise NothingJudgedError(
                f"nothing could be judged in {HOPELESS_ROLLOUTS} rollouts in a row, most often because of: {reason}. "
                "Fix this, and resume from the last checkpoint"
            )
        # The first, the second, the fourth, ...: lasting trouble does not fill the log.
        if self._accelerator.is_main_process and self._troubled_rollouts.bit_count() == 1:
            warnings.warn(
                f"{int(self._rows.sum())} of {len(self._rows)} completions of a rollout could not be judged and are "
                f"left out, most often because of: {reason}. Rollouts with such completions so far: "
                f"{self._troubled_rollouts}",
                stacklevel=2,
            )

    # The update

    def count(self, inputs: dict[str, Any]) -> None:
        """Counts the tokens of a micro-batch that are in the loss."""
        if self._columns:
            self._tokens = self._tokens + loss_mask(inputs).sum()
            self._in_doubt |= self._trouble

    def left_nothing(self) -> bool:
        """Whether the current update has no tokens in the loss, on any process, since nothing could be judged."""
        tokens, in_doubt = self._tokens, self._in_doubt
        self._tokens, self._in_doubt = 0, False
        return in_doubt and not self._accelerator.reduce(tokens, reduction="sum")


def _judges_nothing(verdicts: Counter[tuple[int, bool, bool]], grader: int) -> bool:
    """Whether no completion with an answer could be judged; one without an answer is wrong even if nothing starts."""
    answered = verdicts[grader, True, True] + verdicts[grader, True, False] > 0
    return verdicts[grader, answered, False] > 0 and not verdicts[grader, answered, True]
