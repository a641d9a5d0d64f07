"""What `troll eval` measures, of the completions that TRL samples at every evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor

from troll.evaluation.metrics import task_metrics
from troll.rewards.grading import Grader, Verdict

#: The reward that tells success from failure, by its function's name.
SUCCESS = "success"


class HeldOut:
    """Collects verdicts of held-out completions; every method runs on every process.

    Args:
        reward_funcs: The trainer's; without one named ``success`` there is nothing to measure.
        names: Of the rewards, in TRL's order.
    """

    def __init__(self, reward_funcs: Sequence[Any], names: Sequence[str]) -> None:
        self._place = names.index(SUCCESS) if SUCCESS in names else None
        reward = None if self._place is None else reward_funcs[self._place]
        self._grader = reward if isinstance(reward, Grader) else None
        self._verdicts: list[Verdict] = []

    def observe(self, rewards: Tensor) -> None:
        """Adds the (N, F) rewards of a batch of all processes, right after the rewards of this one were computed."""
        if self._place is None:
            return
        scores = rewards[:, self._place].nan_to_num(0.0).tolist()
        answers: list[str | None] = [None] * len(scores)
        if self._grader is not None and self._grader.votes:
            answers = gather_object([verdict.answer for verdict in self._grader.latest])
        self._verdicts += [Verdict(score, answer, "") for score, answer in zip(scores, answers, strict=True)]

    def metrics(self, samples: int | None, problems: int | None) -> dict[str, float]:
        """The metrics of what was observed, by name, and starts anew; empty if there is nothing to measure.

        Args:
            samples: Completions per problem, one after the other.
            problems: How many there are, None if unknown; what comes after them fills up the last batch.
        """
        assert samples is not None  # TRL's default
        groups = [self._verdicts[start : start + samples] for start in range(0, len(self._verdicts), samples)]
        self._verdicts = []
        if not groups:
            return {}
        grader = self._grader
        return task_metrics(groups[:problems], same=grader.same_answer if grader and grader.votes else None)


@contextmanager
def sampling_temperature(trainer: Any, temperature: float | None) -> Iterator[None]:
    """Samples at another temperature for a while, 0 being greedy; None leaves the trainer's.

    Args:
        trainer: The :class:`~trl.GRPOTrainer`, with transformers' generation or vLLM's.
        temperature: At least 0.
    """
    if temperature is None:
        yield
        return
    if trainer.use_vllm:
        owner, name, value = trainer.vllm_generation, "temperature", temperature
    else:
        sampling = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature}
        owner, name, value = trainer, "generation_config", copy.deepcopy(trainer.generation_config)
        value.update(**sampling)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
