"""Prompts alone: what is good is for a reward model to say."""

from collections.abc import Collection
from typing import Any

from datasets import Dataset

from troll.tasks.registry import Task, TaskConfig, TaskError, register_task
from troll.tasks.splits import read_splits, text_of


@register_task("prompts[:<hub data set>]")
def load(config: TaskConfig, hub_name: str) -> Task:
    """Loads prompts without answers, for the reward model in `config.reward_model`.

    Rows have the field `prompt`: a text, or a conversation of one message by the user. They come from the hub, or from
    `config.dataset_path`, which needs no name (see `troll.tasks.splits.read_splits`). A held-out prompt is dropped from
    training.

    Args:
        config: Path, sizes and the reward model.
        hub_name: The hub's data set, e.g. `trl-lib/ultrafeedback-prompt`; empty for local files.

    Returns:
        The task. Its data sets have the column `prompt`; its rewards are left to the reward model.

    Raises:
        TaskError: If there is no reward model, the data cannot be read, or a row has no such prompt.
    """
    if config.reward_model is None:
        raise TaskError(f"task {config.task!r} has no reward of its own: name a reward model with --reward_model")
    if config.options:
        raise TaskError(f"task {config.task!r} takes no task_options, got {', '.join(config.options)}")
    if not hub_name and config.dataset_path is None:
        raise TaskError("task 'prompts' has no data: name a hub data set, prompts:<hub data set>, or --dataset_path")
    train, test = read_splits(config, hub_name)
    held_out = _prompts(test, "test")
    return Task(
        name=config.task,
        train_dataset=Dataset.from_dict({"prompt": _prompts(train, "train", exclude=set(held_out))}),
        eval_dataset=Dataset.from_dict({"prompt": held_out}),
        reward_funcs=[],
    )


def _prompts(rows: Dataset, split: str, exclude: Collection[str] = ()) -> list[str]:
    prompts = [text_of(_plain(row), "prompt", split, number) for number, row in enumerate(rows)]
    return [prompt for prompt in prompts if prompt not in exclude]


def _plain(row: Any) -> Any:
    """The row with its prompt as text, if it is one message by the user."""
    match row:
        case {"prompt": [{"role": "user", "content": str(content)}]}:
            return {"prompt": content}
    return row
