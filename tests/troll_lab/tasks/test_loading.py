from dataclasses import replace
from typing import Any

import pytest
from datasets import Dataset

from troll_lab.tasks import Task, TaskConfig, TaskError, load_task
from troll_lab.tasks.loading import decontaminate


def success(prompts, completions, **columns):
    return [1.0] * len(completions)


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def make(name: str, *rewards: Any, train: tuple[str, ...] = (), held_out: tuple[str, ...] = ("x",)) -> Task:
    learned, evaluated = (Dataset.from_dict({"prompt": list(prompts)}) for prompts in (train, held_out))
    task = Task(name, learned, evaluated, list(rewards or (success,)))
    return replace(task, train_questions=train, held_out_questions=held_out)


def test_decontaminate_drops_held_out_questions_of_other_tasks():
    task = decontaminate(make("a", length, train=("p", "q", "r")), [make("b", held_out=("q",)), make("c")])
    assert (task.train_dataset["prompt"], task.train_questions) == (["p", "r"], ["p", "r"])
    with pytest.raises(TaskError, match="no train rows left"):
        decontaminate(make("a", train=("p",)), [make("b", held_out=("p", "q"))])


def test_decontaminate_keeps_references_with_their_rows():
    task = replace(make("a", train=("p", "q", "r"), held_out=("x", "y")), references=("P", None, "R", "X", None))
    assert list(decontaminate(task, [make("b", held_out=("q",))]).references) == ["P", "R", "X", None]
    assert list(decontaminate(task, [make("b", held_out=("p",))]).references) == [None, "R", "X", None]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([make("a")], "'a' is there twice"),
        ([make("x/own.yaml"), make("y/own.yaml")], "'own' is there twice"),
        ([make("b", length)], "no reward named 'success'"),
    ],
)
def test_decontaminate_refuses_tasks_of_one_name_or_without_success(others, message):
    with pytest.raises(TaskError, match=message):
        decontaminate(make("a", train=("p",)), others)


def test_decontaminate_compares_all_held_out_questions_without_their_prompts(write):
    rows = [{"problem": f"Question  {n}?", "answer": str(n)} for n in range(4)]
    one_line = {"prompt": "Q: {question}", "system_prompt": "Be brief."}
    spaced = [{"problem": f"Question {n}?\n", "answer": str(n)} for n in (1, 2)]
    other = load_task(TaskConfig("math500", write("other.jsonl", spaced), eval_size=1), conversational=True)
    task = load_task(TaskConfig("math", write("rows.jsonl", rows), eval_size=1, task_options=one_line))
    assert len(other.eval_dataset) == 1
    assert decontaminate(task, [other]).train_dataset["answer"] == ["0"]


def test_prompts_are_the_questions_of_tasks_that_name_none():
    config = TaskConfig("reasoning_gym:chain_sum", train_size=3, eval_size=2)
    plain, chat = (load_task(config, conversational=each) for each in (False, True))
    assert plain.train_questions == chat.train_questions == plain.train_dataset["prompt"]
    assert chat.held_out_questions == plain.eval_dataset["prompt"]
