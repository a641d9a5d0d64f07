"""Several tasks in one run: trained on one of them, judged on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from troll.rewards.completion import Completion
from troll.rewards.grading import Grader, Verdict
from troll.tasks.registry import Reward, RewardFunc, Task, TaskError

#: The column that names a row's task.
TASK = "task"


class ByTask(Grader):
    """Judges each completion by the `success` of its row's task.

    Args:
        rewards: Task name to the reward named `success`.
    """

    def __init__(self, rewards: Mapping[str, RewardFunc]) -> None:
        self._rewards = dict(rewards)
        self._voting = [reward for reward in rewards.values() if isinstance(reward, Grader) and reward.votes]
        self.votes = bool(self._voting)

    def grade(self, completions: Sequence[str], task: Sequence[str] = (), **columns: Any) -> list[Verdict]:
        """Judges completions; those of a task without votes have no answer.

        Args:
            completions: B texts.
            task: The name of each row's task.
            **columns: Of the data set, B values each; what is not one value per completion is for all of them.

        Returns:
            B verdicts.
        """
        verdicts: dict[int, Verdict] = {}
        for name in dict.fromkeys(task):
            rows = [row for row, of in enumerate(task) if of == name]
            texts = [completions[row] for row in rows]
            found = _graded(self._rewards[name], texts, _rows_of(columns, rows, len(completions)))
            verdicts.update(zip(rows, found, strict=True))
        return [verdicts[row] for row in range(len(completions))]

    def same_answer(self, first: str, second: str) -> bool:
        """Whether a task that votes takes two answers for one."""
        return any(reward.same_answer(first, second) for reward in self._voting)


class OnlyFor:
    """A reward of one task; rows of the others have none, which TRL leaves out of its means.

    Args:
        name: The task's.
        reward: The reward.
    """

    def __init__(self, name: str, reward: RewardFunc) -> None:
        self._name, self._reward = name, reward
        self.__name__ = reward.__name__

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Completion], task: Sequence[str], **columns: Any
    ) -> list[float | None]:
        """Rewards in TRL's signature."""
        rows = [row for row, of in enumerate(task) if of == self._name]
        own = _rows_of({"prompts": prompts, "completions": completions, **columns}, rows, len(completions))
        rewards: dict[int, float | None] = dict(zip(rows, self._reward(**own) if rows else [], strict=True))
        return [rewards.get(row) for row in range(len(completions))]


def join(task: Task, others: Sequence[Task]) -> tuple[Task, list[Task]]:
    """Prepares tasks for one trainer, whose rewards are the same functions for all data sets.

    Args:
        task: The one to train on.
        others: Those to be judged on beside it, of different names.

    Returns:
        The tasks again, with the column `task` in their data sets and the rewards of the first for all. What any of
        them holds out is dropped from training.

    Raises:
        TaskError: If a name comes twice, a task cannot tell success from failure, or there is a reward model.
    """
    rewards: dict[str, RewardFunc] = {}
    for each in (task, *others):
        first = each.reward_funcs[0] if each.reward_funcs else None
        if each.name in rewards:
            raise TaskError(f"task {each.name!r} is there twice: name each of eval_tasks once, without the task itself")
        if getattr(first, "__name__", None) != "success":
            raise TaskError(f"task {each.name!r} cannot be judged beside others: it has no reward named 'success'")
        rewards[each.name] = first  # type: ignore[assignment]
    others_of_task: list[Reward] = []
    for reward in task.reward_funcs[1:]:
        if not hasattr(reward, "__name__"):
            raise TaskError("eval_tasks and reward_model exclude each other: a reward model scores every row")
        others_of_task.append(OnlyFor(task.name, reward))
    shared = [ByTask(rewards), *others_of_task]
    held_out = {str(prompt) for other in others for prompt in other.eval_dataset["prompt"]}
    kept = [row for row, prompt in enumerate(task.train_dataset["prompt"]) if str(prompt) not in held_out]
    if not kept:
        raise TaskError(f"task {task.name!r} has no train rows left: eval_tasks hold all of them out")
    task = replace(task, train_dataset=task.train_dataset.select(kept))
    joined = [
        replace(
            each,
            train_dataset=_named(each.train_dataset, each.name),
            eval_dataset=_named(each.eval_dataset, each.name),
            reward_funcs=shared,
        )
        for each in (task, *others)
    ]
    return joined[0], joined[1:]


def _named(dataset: Dataset, name: str) -> Dataset:
    return dataset.add_column(TASK, [name] * len(dataset))


def _graded(reward: RewardFunc, texts: list[str], columns: dict[str, Any]) -> list[Verdict]:
    if isinstance(reward, Grader):
        verdicts = reward.grade(texts, **columns)
        return verdicts if reward.votes else [replace(verdict, answer=None) for verdict in verdicts]
    prompts = columns.pop("prompts", [""] * len(texts))
    return [Verdict(score, None, "") for score in reward(prompts=prompts, completions=texts, **columns)]


def _rows_of(columns: Mapping[str, Any], rows: Sequence[int], size: int) -> dict[str, Any]:
    return {
        name: [values[row] for row in rows] if isinstance(values, list) and len(values) == size else values
        for name, values in columns.items()
    }
