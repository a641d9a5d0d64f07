import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset

from troll.rewards.preference import load_reward_model

RewardFunc = Callable[..., list[float]]
#: What a trainer takes as a reward: a function, or a reward model (`transformers.PreTrainedModel`).
Reward = RewardFunc | Any


class TaskError(ValueError):
    """A task that cannot be loaded; the message is one line that says what is wrong and what to do."""


@dataclass
class TaskConfig:
    """What to train on; every field is an option of the command line.

    Raises:
        TaskError: If `task_options` is a string that is not a JSON object, or a size is below one.
    """

    task: str = field(
        default="reasoning_gym:chain_sum",
        metadata={"help": "Name of the task, e.g. `gsm8k`, or `reasoning_gym:` and one of its data sets."},
    )
    dataset_path: str | None = field(
        default=None,
        metadata={
            "help": "Local file (json, jsonl or parquet), or folder with a train and a test file, to use instead "
            "of the hub's data set."
        },
    )
    task_options: dict | str | None = field(
        default=None,
        metadata={
            "help": "Options of the task as a JSON object, e.g. the configuration of a reasoning-gym data set: "
            '\'{"max_terms": 3, "max_digits": 2}\'.'
        },
    )
    reward_model: str | None = field(
        default=None,
        metadata={
            "help": "Name or path of a sequence classifier trained on preferences, whose score is added to the task's "
            "rewards."
        },
    )
    train_size: int | None = field(
        default=None,
        metadata={"help": "Number of training prompts. Default: all rows of a data set, 4096 of a generator."},
    )
    eval_size: int = field(
        default=256,
        metadata={"help": "Number of held-out prompts (at most; a data set may have fewer)."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.task_options, str):
            self.task_options = _json_object(self.task_options)
        if not isinstance(self.task_options, dict | None):
            raise TaskError(f"task_options must be a JSON object or a YAML mapping, got {self.task_options!r}")
        for name, size in (("train_size", self.train_size), ("eval_size", self.eval_size)):
            if size is not None and size < 1:
                raise TaskError(f"{name} must be at least 1, got {size}")

    @property
    def options(self) -> dict[str, Any]:
        """The task's options as a dictionary, empty where none were given."""
        return dict(self.task_options) if isinstance(self.task_options, dict) else {}


@dataclass(frozen=True)
class Task:
    """A data set, its prompts and its reward under one name.

    Attributes:
        name: The name it was loaded by.
        train_dataset: Rows with a column `prompt` and the columns that the rewards read.
        eval_dataset: Held-out rows with the same columns; shares no prompt with `train_dataset`.
        reward_funcs: Rewards in TRL's signature `(prompts, completions, **columns) -> list[float]`. Where the task can
            tell success from failure, the first is named `success` and returns exactly 0.0 or 1.0. A reward model
            cannot: where it is alone, the mean held-out reward is what training improves.
    """

    name: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[Reward]


Loader = Callable[[TaskConfig, str], Task]

_LOADERS: dict[str, tuple[str, Loader]] = {}


def register_task(pattern: str) -> Callable[[Loader], Loader]:
    """Registers a loader of tasks; use it as a decorator.

    Args:
        pattern: The name users type. `"gsm8k"` takes no argument; `"reasoning_gym:<data set>"` takes one, and what
            stands after the colon in the user's name is handed to the loader; `"prompts[:<hub data set>]"` may do
            without.

    Returns:
        A decorator for a function `(config, argument) -> Task` whose prompts are plain strings (`load_task` makes them
        conversations where the model wants them) and whose `argument` is empty where the name has none.

    Raises:
        ValueError: If the part before the colon is registered already.
    """
    prefix = pattern.partition(":")[0].removesuffix("[")
    if prefix in _LOADERS:
        raise ValueError(f"task {prefix!r} is registered already")

    def register(loader: Loader) -> Loader:
        _LOADERS[prefix] = (pattern, loader)
        return loader

    return register


def load_task(config: TaskConfig, *, conversational: bool = False) -> Task:
    """Loads the task that `config.task` names.

    Args:
        config: The name, options and sizes.
        conversational: Whether prompts are conversations (`[{"role": "user", "content": ...}]`), to which TRL applies
            the chat template, or plain strings. Pass `tokenizer.chat_template is not None`.

    Returns:
        The task, with non-empty data sets, and with the reward model of `config` as its last reward.

    Raises:
        TaskError: If the task, its data, its reward model or one of its options is unknown, missing or unusable.
    """
    prefix, colon, argument = config.task.partition(":")
    if prefix not in _LOADERS:
        known = ", ".join(sorted(pattern for pattern, _ in _LOADERS.values()))
        raise TaskError(f"unknown task {config.task!r}; known tasks: {known}")
    pattern, loader = _LOADERS[prefix]
    takes, needs = ":" in pattern, ":" in pattern and "[" not in pattern
    if (argument and not takes) or (needs and not argument) or (colon and not argument):
        raise TaskError(f"task {config.task!r} is not of the form {pattern!r}")
    task = loader(config, argument)
    for split, dataset in (("train", task.train_dataset), ("eval", task.eval_dataset)):
        if not len(dataset):
            raise TaskError(f"task {config.task!r} has no {split} rows left: check its data and {split}_size")
    if config.reward_model is not None:
        try:
            model = load_reward_model(config.reward_model, conversational=conversational)
        except ValueError as error:
            raise TaskError(str(error)) from error
        task = replace(task, reward_funcs=[*task.reward_funcs, model])
    if not conversational:
        if "images" in task.train_dataset.column_names:
            raise TaskError(f"task {config.task!r} has images, which take a vision-language model with a chat template")
        return task
    return replace(
        task, train_dataset=_conversational(task.train_dataset), eval_dataset=_conversational(task.eval_dataset)
    )


def _conversational(dataset: Dataset) -> Dataset:
    prompts = [[{"role": "user", "content": prompt}] for prompt in dataset["prompt"]]
    # One column alone is exchanged: images in the others would be decoded.
    dataset = dataset.add_column("conversation", prompts)
    return dataset.remove_columns("prompt").rename_column("conversation", "prompt")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"task_options is not valid JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise TaskError(f"task_options must be a JSON object such as '{{\"max_terms\": 3}}', got {text}")
    return value
