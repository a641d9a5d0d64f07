"""Loads tasks: those that are registered by name, and those of a user's YAML or Python file.

`load_task` is the way in. `decontaminate` drops the held-out questions of other tasks from a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from troll.grading import TAKEN, clash
from troll.settings import parse
from troll_lab.rewards.answers import INSTRUCTIONS, AnswerFormat
from troll_lab.rewards.preference import load_reward_model
from troll_lab.tasks.code import load_tested
from troll_lab.tasks.dataset_task import DatasetOptions, Example, PromptStyle, dataset_task
from troll_lab.tasks.mathematics import load_mathematics
from troll_lab.tasks.registry import (
    CHAT_PROMPT,
    RewardFunc,
    Task,
    TaskConfig,
    TaskError,
    is_file,
    known_tasks,
    registration_of,
    spaced_once,
)
from troll_lab.tasks.rows import Column, Row
from troll_lab.tasks.splits import SUFFIXES, Source
from troll_lab.terminal import UsageError, raised_as
from troll_lab.user_files import import_file, load_function
from troll_lab.values import read_yaml

# The library's rewards in a YAML file: the column that each needs next to the prompt, and its loader.
_REWARDS = {"math": ("answer", load_mathematics), "code": ("tests", load_tested)}


@dataclass(frozen=True)
class TaskFile:
    """The fields of a YAML file, which docs/tasks.md describes; empty ones are left out."""

    dataset: str = ""
    eval_dataset: str = ""
    dataset_config: str = ""
    train_split: str = ""
    eval_split: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    reward: str = ""
    task_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardedOptions(DatasetOptions):
    """The options of a YAML file with a reward of its own.

    Attributes:
        answer_format: The form in which prompts ask for an answer, which the reward reads by itself.
    """

    answer_format: Literal["none", AnswerFormat] = "none"


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
        others = ", ".join(pattern for pattern, entry in known_tasks().items() if entry.trains)
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
            raise TaskError(f"task {name!r} occurs twice: name each of eval_tasks once, without the task itself")
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


def load_file(config: TaskConfig) -> Task:
    """Loads a user's task from a Python or a YAML file.

    A Python file, `path.py[:argument]`, defines `load(config, argument)`, a function with the signature that
    `register_task` requires: it returns a `Task` whose prompts are plain text. docs/tasks.md describes the fields of a
    YAML file. Its `task_options` are defaults for those of `config`, and `config.dataset_path` replaces its data. Paths
    in it are relative to it.

    Raises:
        TaskError: If the file is missing or cannot be read, its function is missing or returns something else, or one
            of its fields is unknown, missing or unusable; names the file and the field.
    """
    name, _, argument = config.task.partition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise TaskError(f"task {config.task!r}: there is no file {path}")
    is_python = path.name.endswith(".py")
    if argument and not is_python:
        raise TaskError(f"task {config.task!r}: a YAML file takes no argument after a colon")
    try:
        return _load_python(path, config, argument) if is_python else _load_yaml(path, config)
    except TaskError:
        raise
    except UsageError as error:  # of a Python file that cannot be imported
        raise TaskError(str(error)) from error


def _load_python(path: Path, config: TaskConfig, argument: str) -> Task:
    load = getattr(import_file(path), "load", None)
    if not callable(load):
        raise TaskError(f"{path} must define load(config, argument), which returns a troll_lab.tasks.Task")
    task = load(config, argument)
    if not isinstance(task, Task):
        raise TaskError(f"load in {path} must return a troll_lab.tasks.Task, got {type(task).__name__}")
    return replace(task, files=[path])


def _load_yaml(path: Path, config: TaskConfig) -> Task:
    given = _yaml_fields(path)
    source = _yaml_source(path, given)
    config, reward = replace(config, task_options=given.task_options | config.options), given.reward
    if reward in _REWARDS:
        answer, load = _REWARDS[reward]
        if set(source.columns) != {"prompt", answer}:
            names = ", ".join(source.columns)
            raise TaskError(f"{path}: columns must name prompt and {answer} for this reward, got {names}")
        return replace(load(config, source), files=[path])
    function, file = load_function(reward, path.parent, f"{path}: reward", *_REWARDS)
    task = _load_rewarded(config, source, function)
    return replace(task, files=[path, file] if file else [path])


def _load_rewarded(config: TaskConfig, source: Source, reward: RewardFunc) -> Task:
    """A task whose reward gets all columns except the prompt, as text, under the names of the YAML file."""
    options = config.read_options(RewardedOptions)
    instruction = "" if options.answer_format == "none" else INSTRUCTIONS[options.answer_format]
    template = "{question}\n{instruction}" if instruction else "{question}"

    def read(row: Row) -> Example:
        return Example(row.text("prompt"), {name: row.answer(name) for name in source.columns if name != "prompt"})

    return dataset_task(
        config,
        source,
        options,
        read=read,
        style=PromptStyle(template, instruction),
        rewards=[(reward, 1.0)],
    )


def _yaml_fields(path: Path) -> TaskFile:
    with raised_as(TaskError):
        given = parse(TaskFile, read_yaml(path), str(path), "the task")
    for name in ("dataset", "columns", "reward"):
        if not getattr(given, name):
            raise TaskError(f"{path}: field {name!r} is missing")
    columns = given.columns
    if "prompt" not in columns:
        raise TaskError(f"{path}: columns must name the data's columns, such as {{prompt: question, answer: solution}}")
    if taken := [name for name in (*TAKEN, "completion") if name in columns]:  # TRL keeps `completion` to itself
        raise TaskError(
            f"{path}: columns: a reward cannot get a column under the name {taken[0]!r}, which TRL uses for something "
            f"else: choose another, such as gold: {columns[taken[0]]}"
        )
    return given


def _yaml_source(path: Path, given: TaskFile) -> Source:
    local = path.parent / Path(given.dataset).expanduser()
    held_out = path.parent / Path(given.eval_dataset).expanduser() if given.eval_dataset else None
    if not local.exists():
        if held_out is not None:
            raise TaskError(f"{path}: eval_dataset needs a local dataset, and there is no {local}")
        if given.dataset.count("/") != 1 or Path(given.dataset).suffix in SUFFIXES:
            raise TaskError(f"{path}: dataset: there is no {local}, and it is not a name on the hub such as owner/name")
    elif unused := [name for name in ("dataset_config", "train_split", "eval_split") if getattr(given, name)]:
        raise TaskError(f"{path}: {unused[0]} is of a data set on the hub, and {local} is local: leave it out")
    return Source(
        given.dataset,
        {name: Column((column,)) for name, column in given.columns.items()},
        given.dataset_config or None,
        train=given.train_split or "train",
        held_out=given.eval_split or "test",
        needs_held_out=bool(given.eval_split),
        path=local if local.exists() else None,
        held_out_path=held_out,
    )
