"""The metrics of `troll eval` for the completions that TRL samples at every evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from troll.grading import Grader, Verdict, completion_text
from troll.trl.estimators import combine_rewards
from troll.trl.ungraded import UngradedFilter
from troll_lab.evaluation.estimators import task_estimates
from troll_lab.trl import seam

# The reward that tells success from failure, by its function's name.
_SUCCESS_REWARD = "success"

#: How many answers of an evaluation are kept for the report.
_SHOWN = 5


@dataclass(frozen=True)
class Answer:
    """An answer of an evaluation, for the report.

    Attributes:
        question: The prompt; of a conversation, its last message.
        text: The completion; of a conversation, its last message.
        success: The reward `success`; None if the answer could not be judged, or the task does not define success.
    """

    question: str
    text: str
    success: float | None


class EvalMetrics:
    """Collects rewards and verdicts of held-out completions; every method runs on every process.

    Args:
        reward_funcs: The trainer's reward functions; without one named `success` only rewards are measured.
        names: The names of the F rewards, in TRL's order.
        weights: (F,), the weights of the rewards.
    """

    def __init__(self, reward_funcs: Sequence[Any], names: Sequence[str], weights: Tensor) -> None:
        self._names, self._weights = names, weights.double().cpu()
        self._place = names.index(_SUCCESS_REWARD) if _SUCCESS_REWARD in names else None
        reward = None if self._place is None else reward_funcs[self._place]
        self._grader = reward if isinstance(reward, Grader) else None
        self.start()

    def start(self) -> None:
        """Begins an evaluation, without the rewards and verdicts of an interrupted one."""
        self._rewards: list[Tensor] = []
        self._verdicts: list[Verdict] = []
        #: The reward `success` of each completion of the last evaluation; None if it could not be judged. Completions
        #: that only fill up the last batch are among them.
        self.successes: list[float | None] = []
        #: Answers to the first problems; complete on the main process only.
        self.answers: list[Answer] = []

    def observe(self, rewards: Tensor) -> None:
        """Adds the (N, F) rewards of a batch of all processes; call it right after this process computed its own."""
        self._rewards.append(rewards.double().cpu())
        if self._place is None:
            return
        given = [None if math.isnan(each) else each for each in rewards[:, self._place].tolist()]
        found: list[tuple[float | None, str | None]] = [(reward, None) for reward in given]
        if self._grader is not None:  # its verdicts have more than the reward: partial credit, and the answers
            found = gather_object([(verdict.score, verdict.answer) for verdict in self._grader.latest])
        self.successes += given
        for reward, (score, answer) in zip(given, found, strict=True):
            # Another grader may not have been able to judge it.
            self._verdicts.append(Verdict(None if reward is None else score, answer, ""))

    def keep_answers(self, prompts: Sequence[Any], completions: Sequence[Any], rewards: Tensor) -> None:
        """Keeps one answer to each of the first problems, of the main process's completions.

        Args:
            prompts: N texts or conversations.
            completions: N texts or conversations.
            rewards: At least (N, F), by F reward functions; the first rows are those of the main process.
        """
        for prompt, completion, row in zip(prompts, completions, rewards.tolist(), strict=False):
            question = prompt if isinstance(prompt, str) else _text(prompt[-1]["content"])
            if len(self.answers) == _SHOWN:
                return
            if question not in [each.question for each in self.answers]:
                success = None if self._place is None or math.isnan(row[self._place]) else row[self._place]
                self.answers.append(Answer(question, completion_text(completion), success))

    def metrics(self, samples: int | None, problems: int | None) -> dict[str, float]:
        """The metrics of the observed completions, by name; empty if there are none.

        Mean rewards are among them, since TRL takes the mean over batches, of which the last may be short or filled up.
        Completions that could not be judged are left out; with a grader, their share is `rewards/unscored`.

        Args:
            samples: Completions per problem; those of one problem follow each other.
            problems: Number of problems, None if unknown; completions after them only fill up the last batch.
        """
        assert samples is not None  # TRL's default
        if not self._rewards:
            return {}
        rewards = torch.cat(self._rewards)[: None if problems is None else samples * problems]
        means = {"reward": combine_rewards(rewards, self._weights).nanmean().item()}
        means |= {
            f"rewards/{name}/mean": row.nanmean().item() for name, row in zip(self._names, rewards.T, strict=True)
        }
        found = {name: mean for name, mean in means.items() if not math.isnan(mean)}
        if self._place is None:
            return found
        groups = [self._verdicts[start : start + samples] for start in range(0, len(rewards), samples)]
        grader = self._grader
        estimates = task_estimates(groups, same=grader.same_answer if grader and grader.votes else None)
        found |= {name: estimate.value for name, estimate in estimates.items()}
        if grader is not None:
            found["rewards/unscored"] = rewards[:, self._place].isnan().double().mean().item()
        return found


def _text(content: Any) -> str:
    """The text of a message, which may have images among its parts."""
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content or ()).strip()


@contextmanager
def sampling_temperature(trainer: Any, temperature: float | None) -> Iterator[None]:
    """Samples at another temperature within the context; 0 is greedy, and None keeps the trainer's."""
    if temperature is None:
        yield
        return
    if trainer.use_vllm:
        with seam.replaced(trainer.vllm_generation, temperature=temperature):
            yield
        return
    config = copy.deepcopy(trainer.generation_config)
    greedy = temperature == 0
    config.update(**({"do_sample": False} if greedy else {"do_sample": True, "temperature": float(temperature)}))
    with seam.replaced(trainer, generation_config=config):
        yield


@contextmanager
def judged_by(trainer: Any, reward_funcs: Sequence[Any], reward_weights: Sequence[float] | None) -> Iterator[None]:
    """A context in which a trainer evaluates by the rewards of another task.

    The trainer's table of completions does not show those of the context, since a step has only one table.

    Args:
        trainer: The `LabTrainer`.
        reward_funcs: The other task's reward functions; reward models are not taken.
        reward_weights: One weight for each; None for 1.0.
    """
    names = [seam.get_callable_name(reward) for reward in reward_funcs]
    weights = torch.tensor([1.0] * len(names) if reward_weights is None else list(reward_weights))
    rewards = {
        "reward_funcs": list(reward_funcs),
        "reward_func_names": names,
        "reward_processing_classes": [None] * len(names),
        "reward_weights": weights,
        "eval_metrics": EvalMetrics(reward_funcs, names, weights),
        "ungraded": UngradedFilter(trainer.accelerator, reward_funcs, weights),
    }
    with seam.replaced(trainer, **rewards), seam.without_table(trainer):
        yield
