"""Keeps the held-out questions of other tasks out of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from troll.tasks.registry import Task, TaskError


def decontaminate(task: Task, others: Sequence[Task]) -> Task:
    """Drops training rows with a question that another task holds out; the prompts around it are not compared.

    Raises:
        TaskError: If two tasks have the same name for their metrics, one of the others cannot tell success from
            failure, or no row is left to train on.
    """
    names = [each.short_name for each in (task, *others)]
    for name in names:
        if names.count(name) > 1:
            raise TaskError(f"task {name!r} is there twice: name each of eval_tasks once, without the task itself")
    for other in others:
        if not other.reward_funcs or getattr(other.reward_funcs[0], "__name__", None) != "success":
            raise TaskError(f"task {other.name!r} cannot be judged with others: it has no reward named 'success'")
    asked = {question for other in others for question in other.held_out_questions or ()}
    questions = task.train_questions or ()
    kept = [row for row, question in enumerate(questions) if question not in asked]
    if not kept:
        raise TaskError(f"task {task.name!r} has no train rows left: eval_tasks hold all of them out")
    references = task.references
    if references:
        references = [*(references[row] for row in kept), *references[len(task.train_dataset) :]]
    return replace(
        task,
        train_dataset=task.train_dataset.select(kept),
        train_questions=[questions[row] for row in kept],
        references=references,
    )
