"""The type of tasks, their configuration, and the registry of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset

from troll.settings import described, did_you_mean, parse
from troll_lab.terminal import UsageError, raised_as
from troll_lab.values import parsed

T = TypeVar("T")

RewardFunc = Callable[..., list[float]]
#: A reward that a trainer takes: a function, or a reward model (`transformers.PreTrainedModel`).
Reward = RewardFunc | Any

DEFAULT_EVAL_SIZE = 256

#: The column with the prompts for conversations, if they differ from those for plain text.
CHAT_PROMPT = "chat_prompt"

#: The endings of files with a user's task, see `troll_lab.tasks.loading`.
_FILES = (".py", ".yaml", ".yml")


class TaskError(UsageError):
    """A task that cannot be loaded."""


@described
@dataclass
class TaskConfig:
    """The configuration of a task; every field is an option of the command line.

    Attributes:
        task: Name of the task, e.g. `gsm8k`, or `reasoning_gym:` and one of its data sets; or the path of a YAML or
            Python file with a task of your own.
        dataset_path: Local file (json, jsonl or parquet), or folder with a train and a test file, to use instead of the
            hub's data set.
        task_options: Options of the task, as a dictionary or a JSON object: e.g. `{"answer_format": "tag"}` of
            mathematics, or the configuration of a reasoning-gym data set, `{"max_terms": 3, "max_digits": 2}`.
        reward_model: Name or path of a sequence classifier trained on preferences, whose score is added to the task's
            rewards.
        train_size: Number of training prompts, at least 1. Default: all rows of a data set, 4096 of a generator.
        eval_size: Largest number of held-out prompts, at least 1; a data set may have fewer. None (in YAML, null) is
            all of them, or 256 if the last rows of one file are held out.
        eval_tasks: Other tasks to evaluate on as well, each a name, or `name=path` for local data, e.g.
            `aime24 amc23=data/amc23.jsonl`. In YAML, an entry may be a mapping with `task`, `dataset_path` and
            `task_options`.
        warm_up: Settings of the toy model's warm-up before the run, as a dictionary or a JSON object with fields of
            `troll_lab.runs.toy_model.WarmUp`, e.g. `{"max_steps": 500}`. Only for the toy model.
        rollout_func: TRL's `rollout_func`, which generates the completions in training and in its evaluations:
            `FILE.py:function` or `module:function`. None lets TRL generate.

    Raises:
        TaskError: If `task_options` is a string that is not a JSON object, or a size is below one.
    """

    task: str = "reasoning_gym:chain_sum"
    dataset_path: str | None = None
    task_options: dict | str | None = None
    reward_model: str | None = None
    train_size: int | None = None
    eval_size: int | None = DEFAULT_EVAL_SIZE
    eval_tasks: list[str] | None = None
    warm_up: dict | str | None = None
    rollout_func: str | None = None

    def __post_init__(self) -> None:
        for name in ("task_options", "warm_up"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, json_object(name, value))
            elif not isinstance(value, dict | None):
                raise TaskError(f"{name} must be a JSON object or a YAML mapping, got {value!r}")
        for name, size in (("train_size", self.train_size), ("eval_size", self.eval_size)):
            if size is not None and size < 1:
                raise TaskError(f"{name} must be at least 1, got {size}")
        if isinstance(self.eval_tasks, str):
            self.eval_tasks = [self.eval_tasks]
        self.other_tasks()  # raises if an entry is not a task

    @property
    def options(self) -> dict[str, Any]:
        """The task's options as a dictionary, empty if none were given."""
        return dict(self.task_options) if isinstance(self.task_options, dict) else {}

    def read_options(self, kind: type[T], **defaults: Any) -> T:
        """The options as a dataclass, with a task's own defaults; raises TaskError if one is unknown or unusable."""
        with raised_as(TaskError):
            return parse(kind, {**defaults, **self.options}, "task_options", f"task {self.task!r}")

    def other_tasks(self) -> list[TaskConfig]:
        """The configurations of `eval_tasks`, which share only `eval_size` with this task."""
        return [_to_evaluate(entry, self.eval_size) for entry in self.eval_tasks or []]


@dataclass(frozen=True)
class Task:
    """A data set, its prompts and its reward under one name.

    Attributes:
        name: The name that the task was loaded by.
        train_dataset: Rows with a column `prompt` and the columns that the rewards read; empty for a benchmark.
        eval_dataset: Held-out rows with the same columns; shares no prompt with `train_dataset`.
        reward_funcs: Rewards in TRL's signature `(prompts, completions, **columns) -> list[float]`. If the task can
            tell success from failure, the first is named `success` and returns exactly 0.0 or 1.0. A reward model
            cannot: with only a reward model, training improves the mean held-out reward.
        reward_weights: TRL's `reward_weights`, one for each reward: a reward of weight 0.0 is logged and not trained
            on. None for 1.0 each.
        system_prompt: The text before every prompt: a separate message in a conversation, a paragraph in plain text.
        examples: Prompts and their answers, before every prompt and after the system prompt: turns of a conversation,
            paragraphs in plain text.
        train_questions: The question of each row of `train_dataset`, with single spaces, without the rest of the
            prompt; by default the prompts.
        held_out_questions: The same for all held-out rows, whether they are evaluated or not; by default the prompts of
            `eval_dataset`.
        references: Solutions of the rows of `train_dataset` and then of `eval_dataset`, None for a row without one. For
            code, a solution is a program without the text of the row's `prefix`.
        files: The user's files that define the task.
        hub_dataset: The hub's name of the data set with the rows; None for local data, or a generator.
    """

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[Reward]
    reward_weights: list[float] | None = None
    system_prompt: str | None = None
    examples: Sequence[tuple[str, str]] = ()
    train_questions: Sequence[str] | None = None
    held_out_questions: Collection[str] | None = None
    references: Sequence[str | None] = ()
    files: Sequence[Path] = ()
    hub_dataset: str | None = None

    @property
    def has_success(self) -> bool:
        """Whether the task can tell success from failure."""
        return bool(self.reward_funcs) and getattr(self.reward_funcs[0], "__name__", None) == "success"

    @property
    def short_name(self) -> str:
        """The name in metrics: the task's name; for a file, the file's name without folder and ending."""
        path, colon, argument = self.name.partition(":")
        return re.sub(r"[^\w.-]+", "-", f"{Path(path).stem}{colon}{argument}") if is_file(self.name) else self.name


def spaced_once(text: str) -> str:
    """The text with single spaces, so that questions that differ only in their spacing are equal."""
    return " ".join(text.split())


Loader = Callable[[TaskConfig, str], Task]


@dataclass(frozen=True)
class Registration:
    """The name, the loader, the kind and the description of a task, see `register_task`."""

    pattern: str
    loader: Loader
    trains: bool
    about: str


_LOADERS: dict[str, Registration] = {}


def register_task(pattern: str, *, trains: bool = True, about: str = "") -> Callable[[Loader], Loader]:
    """Registers a loader of tasks; use it as a decorator.

    Args:
        pattern: The name that users type. `"gsm8k"` takes no argument; `"reasoning_gym:<data set>"` takes one, the text
            after the colon; `"prompts[:<hub data set>]"` takes an optional one.
        trains: Whether the task has rows to train on; a benchmark has none.
        about: What the task asks, in one sentence, for the list of tasks and the report of a run.

    Returns:
        A decorator for a function `(config, argument) -> Task`. Its prompts are plain strings: for a chat model,
        `load_task` makes conversations of them, or of the column `chat_prompt` if there is one. `argument` is the text
        after the colon, or empty. The rows that it holds out must not depend on `config.train_size`, since an
        evaluation asks for one row to train on.

    Raises:
        ValueError: If the part before the colon is registered already.
    """
    prefix = pattern.partition(":")[0].removesuffix("[")
    if prefix in _LOADERS:
        raise ValueError(f"task {prefix!r} is registered already")

    def register(loader: Loader) -> Loader:
        _LOADERS[prefix] = Registration(pattern, loader, trains, about)
        return loader

    return register


def known_tasks() -> dict[str, Registration]:
    """Returns the registrations by the patterns of their names, in the order of the alphabet."""
    return {entry.pattern: entry for entry in sorted(_LOADERS.values(), key=lambda entry: entry.pattern)}


def registration_of(task: str) -> tuple[Registration, str]:
    """The registration of a task's name, and the text after the colon in it.

    Raises:
        TaskError: If the task is unknown, or its name is not of the form that is registered.
    """
    prefix, colon, argument = task.partition(":")
    if prefix not in _LOADERS:
        hint, known = did_you_mean(prefix, _LOADERS) or ";", ", ".join(known_tasks())
        raise TaskError(f"unknown task {task!r}{hint} known tasks: {known}; or the path of a .yaml or .py file")
    pattern = _LOADERS[prefix].pattern
    takes, needs = ":" in pattern, ":" in pattern and "[" not in pattern
    if (argument and not takes) or (needs and not argument) or (colon and not argument):
        raise TaskError(f"task {task!r} is not of the form {pattern!r}")
    return _LOADERS[prefix], argument


def about(task: str) -> str:
    """What a task asks, in one sentence; empty if its registration does not say, or a file defines it."""
    prefix = task.partition(":")[0]
    return _LOADERS[prefix].about if prefix in _LOADERS else ""


def is_file(task: str) -> bool:
    """Whether a task's name is the path of a file with a user's task."""
    return task.partition(":")[0].endswith(_FILES)


def least_train_size(task: str) -> int | None:
    """The `train_size` for a task that is only evaluated, so that no training rows are read or generated needlessly.

    None for a file, which is loaded as for training, since its held-out rows may depend on the size.
    """
    return None if is_file(task) else 1


def _to_evaluate(entry: Any, eval_size: int | None) -> TaskConfig:
    """The configuration of an entry of `eval_tasks`."""
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        entry = {"task": name, "dataset_path": path or None}
    fields = {"task", "dataset_path", "task_options"}
    if not isinstance(entry, dict) or "task" not in entry or not fields.issuperset(entry):
        raise TaskError(f"eval_tasks takes names, or mappings with task, dataset_path and task_options, got {entry!r}")
    return TaskConfig(**entry, train_size=least_train_size(str(entry["task"])), eval_size=eval_size)


def json_object(name: str, text: str) -> dict[str, Any]:
    """Reads an option of the command line that is a JSON object, or a mapping of YAML.

    Args:
        name: The option's name, for errors.
        text: The text of the option.

    Raises:
        TaskError: If it is something else.
    """
    try:
        value = parsed(text)
    except ValueError as error:
        raise TaskError(f"{name} is not valid JSON or YAML ({error}): {text}") from error
    if not isinstance(value, dict):
        raise TaskError(f"{name} must be a JSON object such as '{{\"name\": 3}}', got {text}")
    return value
