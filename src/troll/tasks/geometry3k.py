"""Geometry problems with a diagram."""

from collections.abc import Collection
from typing import Any

from datasets import Dataset, Image, List

from troll.rewards.math import success
from troll.tasks.mathematics import INSTRUCTION, check_math_verify
from troll.tasks.registry import Task, TaskConfig, TaskError, register_task
from troll.tasks.splits import read_splits, text_of

HUB_NAME = "hiyouga/geometry3k"

#: Where the data set's text says that a diagram comes; TRL puts the images before the text.
_PLACEHOLDER = "<image>"


@register_task("geometry3k")
def load(config: TaskConfig, argument: str = "") -> Task:
    r"""Loads Geometry3K: questions of plane geometry about a diagram, for vision-language models.

    The hub's `hiyouga/geometry3k`, or `config.dataset_path` (see `troll.tasks.splits.read_splits`; parquet keeps the
    images). Rows have the fields `images`, `problem` and `answer`. A training row with a held-out problem *and* the
    same answer is dropped: many diagrams share a text such as "Find x."

    Args:
        config: Path and sizes; all training rows and at most `eval_size` of the test rows by default.
        argument: Unused: the task takes none.

    Returns:
        The task. Its data sets have the columns `prompt`, `images` and `answer`.

    Raises:
        TaskError: If the data cannot be reached or read, or a row lacks its images, its problem or its answer.
    """
    check_math_verify()
    if config.options:
        raise TaskError(f"task {config.task!r} takes no task_options, got {', '.join(config.options)}")
    train, test = read_splits(config, HUB_NAME)
    held_out, asked = _to_prompts(test, "test")
    return Task(
        name=config.task,
        train_dataset=_to_prompts(train, "train", exclude=asked)[0],
        eval_dataset=held_out,
        reward_funcs=[success],
    )


def _to_prompts(rows: Dataset, split: str, exclude: Collection[tuple[str, str]] = ()) -> tuple[Dataset, set[Any]]:
    """The rows as prompts, and what they ask and expect."""
    for field in ("images", "problem", "answer"):
        if field not in rows.column_names:
            raise TaskError(f"the {split} rows have no field {field!r}, only {', '.join(rows.column_names)}")
    kept, prompts, answers, asked = [], [], [], set()
    rows = rows.select_columns(["images", "problem", "answer"])
    # Not decoded: whether they are there is all that matters here.
    for number, row in enumerate(rows.cast_column("images", List(Image(decode=False)))):
        if not row["images"] or None in row["images"]:
            raise TaskError(f"{split} row {number} (counted from 0) has no image in its field 'images'")
        problem = text_of(row, "problem", split, number).replace(_PLACEHOLDER, "").strip()
        answer = text_of(row, "answer", split, number)
        asked.add((problem, answer))
        if (problem, answer) not in exclude:
            kept.append(number)
            prompts.append(f"{problem}\n{INSTRUCTION}")
            answers.append(answer)
    images = rows.select(kept).select_columns("images").cast_column("images", List(Image()))
    return images.add_column("prompt", prompts).add_column("answer", answers), asked
