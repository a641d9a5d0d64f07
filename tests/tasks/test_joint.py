"""Several tasks in one run."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from troll.rewards.grading import Grader, Verdict
from troll.tasks import Task, TaskError
from troll.tasks.joint import join


class Equals(Grader):
    """Right where the completion is the column `answer`."""

    def __init__(self, votes: bool = True) -> None:
        self.votes = votes

    def grade(self, completions, answer=(), **columns: Any):
        return [Verdict(float(text == gold), text, "") for text, gold in zip(completions, answer, strict=True)]


def success(prompts, completions, seed, **columns):
    assert len(prompts) == len(completions) == len(seed)
    return [float(text == str(number)) for text, number in zip(completions, seed, strict=True)]


def length(prompts, completions, answer, **columns):
    assert len(answer) == len(completions)
    return [float(len(text)) for text in completions]


def make(name: str, rewards: list[Any], train: int = 2, **columns: list[Any]) -> Task:
    held_out = Dataset.from_dict({"prompt": [f"{name} {row}" for row in range(2)], **columns})
    learned = Dataset.from_dict({"prompt": [f"train {row}" for row in range(train)]})
    return Task(name, learned, held_out, rewards)


def test_every_row_is_judged_by_its_own_task():
    trained = make("sums", [Equals(), length], answer=["1", "2"])
    joined, others = join(
        trained, [make("codes", [Equals(votes=False)], answer=["a", "b"]), make("gym", [success], seed=[3, 4])]
    )
    judge: Any = joined.reward_funcs[0]
    assert judge.__name__ == "success"
    assert [task.reward_funcs is joined.reward_funcs for task in others] == [True, True]
    rows = [*joined.eval_dataset, *others[0].eval_dataset, *others[1].eval_dataset]
    columns = {name: [row.get(name) for row in rows] for name in ("task", "answer", "seed")}
    texts = ["1", "0", "a", "0", "3", "0"]
    assert judge(prompts=texts, completions=texts, trainer_state=object(), **columns) == [1, 0, 1, 0, 1, 0]
    # A program has no vote.
    assert [verdict.answer for verdict in judge.latest] == ["1", "0", None, None, None, None]
    assert judge.votes and judge.same_answer("1", "1") and not judge.same_answer("1", "2")
    only: Any = joined.reward_funcs[1]
    assert only.__name__ == "length"
    assert only(prompts=texts, completions=texts, **columns) == [1.0, 1.0, None, None, None, None]


def test_without_votes_anywhere_there_are_none():
    joined, _ = join(make("a", [Equals(votes=False)]), [make("b", [success])])
    judge: Any = joined.reward_funcs[0]
    assert not judge.votes


def test_what_another_task_holds_out_is_not_trained_on():
    joined, _ = join(make("a", [Equals()], train=3), [make("train", [Equals()])])
    assert joined.train_dataset["prompt"] == ["train 2"]
    with pytest.raises(TaskError, match="no train rows left"):
        join(make("a", [Equals()], train=2), [make("train", [Equals()])])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([make("a", [Equals()])], "there twice"),
        ([make("b", [])], "no reward named 'success'"),
        ([make("b", [length])], "no reward named 'success'"),
    ],
)
def test_what_cannot_be_joined_is_refused(others, message):
    with pytest.raises(TaskError, match=message):
        join(make("a", [Equals()]), others)


def test_a_reward_model_is_refused():
    with pytest.raises(TaskError, match="reward_model"):
        join(make("a", [Equals(), object()]), [make("b", [Equals()])])
