"""Loads tasks by name, with prompts in a trainer's form, and drops the held-out questions of other tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from troll.grading import clash
from troll_lab.rewards.preference import load_reward_model
from troll_lab.tasks.custom import load_file
from troll_lab.tasks.registry import (
    CHAT_PROMPT,
    Task,
    TaskConfig,
    TaskError,
    is_file,
    known_tasks,
    registration_of,
    spaced_once,
)


def load_task(config: TaskConfig, *, conversational: bool = False, for_training: bool = False) -> Task:
    """Loads the task that `config.task` names.

    Args:
        config: The name, or the path of a file with a task, options and sizes.
        conversational: Whether prompts are conversations (`[{"role": "user", "content": ...}]`), to which TRL applies
            the chat template, or plain strings. Pass `tokenizer.chat_template is not None`.
        for_training: Whether a task without rows to train on is an error.

    Returns:
        The task, with held-out rows, and with the reward model of `config` as its last reward.

    Raises:
        TaskError: If the task, its data, its reward model or one of its options is unknown, missing or unusable.
    """
    trains = True
    if is_file(config.task):
        task = load_file(config)
    else:
        registration, argument = registration_of(config.task)
        task, trains = registration.loader(config, argument), registration.trains
    if problem := clash([*task.train_dataset.column_names, *task.eval_dataset.column_names]):
        raise TaskError(f"task {config.task!r}: {problem}")
    if not len(task.eval_dataset):
        raise TaskError(f"task {config.task!r} has no eval rows left: check its data and eval_size")
    if for_training and not len(task.train_dataset):
        if trains:
            raise TaskError(f"task {config.task!r} has no train rows left: check its data and train_size")
        others = ", ".join(pattern for pattern, can_train in known_tasks().items() if can_train)
        raise TaskError(f"task {config.task!r} is a benchmark, without rows to train on; train on one of {others}")
    if config.reward_model is not None:
        try:
            model = load_reward_model(config.reward_model, conversational=conversational)
        except ValueError as error:
            raise TaskError(str(error)) from error
        weights = None if task.reward_weights is None else [*task.reward_weights, 1.0]
        task = replace(task, reward_funcs=[*task.reward_funcs, model], reward_weights=weights)
    if not conversational and "images" in task.eval_dataset.column_names:
        raise TaskError(f"task {config.task!r} has images, which take a vision-language model with a chat template")
    return replace(
        task,
        train_dataset=_with_prompts(task.train_dataset, task, conversational),
        eval_dataset=_with_prompts(task.eval_dataset, task, conversational),
        train_questions=_prompts(task.train_dataset) if task.train_questions is None else task.train_questions,
        held_out_questions=_prompts(task.eval_dataset) if task.held_out_questions is None else task.held_out_questions,
    )


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
        if not other.has_success:
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


def _prompts(dataset: Dataset) -> list[str]:
    return [spaced_once(prompt) for prompt in dataset["prompt"]]


def _with_prompts(dataset: Dataset, task: Task, conversational: bool) -> Dataset:
    """The rows with prompts that begin with the task's system prompt and examples."""
    other = [CHAT_PROMPT] if CHAT_PROMPT in dataset.column_names else []
    if conversational:
        said = [] if task.system_prompt is None else [{"role": "system", "content": task.system_prompt}]
        for prompt, answer in task.examples:
            said += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        asked = dataset[CHAT_PROMPT if other else "prompt"]
        prompts: list[Any] = [[*said, {"role": "user", "content": prompt}] for prompt in asked]
    else:
        before = [] if task.system_prompt is None else [task.system_prompt]
        before += [f"{prompt} {answer}" for prompt, answer in task.examples]
        if not before:
            return dataset.remove_columns(other)
        prompts = ["\n\n".join([*before, prompt]) for prompt in dataset["prompt"]]
    # Single columns are replaced: images in the others would be decoded.
    old = ["prompt", *other]
    return dataset.add_column("new_prompt", prompts).remove_columns(old).rename_column("new_prompt", "prompt")
