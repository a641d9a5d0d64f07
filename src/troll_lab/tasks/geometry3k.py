"""Geometry problems with a diagram."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from datasets import Dataset, Features, Image, List, Value

from troll_lab.rewards.answers import INSTRUCTIONS
from troll_lab.rewards.mathematics import MathGrader
from troll_lab.tasks.dataset_task import ColumnOptions
from troll_lab.tasks.mathematics import check_math_verify
from troll_lab.tasks.registry import Task, TaskConfig, register_task, spaced_once
from troll_lab.tasks.rows import Column, Rows
from troll_lab.tasks.splits import Source, read_splits

_SOURCE = Source("hiyouga/geometry3k", {name: Column((name,)) for name in ("images", "problem", "answer")})
_FEATURES = Features({"images": List(Image()), "prompt": Value("string"), "answer": Value("string")})

#: The data set's mark for a diagram in a text; TRL puts the images before the text.
_PLACEHOLDER = "<image>"


@register_task("geometry3k", about="Questions of plane geometry about a diagram.")
def load(config: TaskConfig, argument: str = "") -> Task:
    r"""Loads Geometry3K: questions of plane geometry about a diagram, for vision-language models.

    Local files should be parquet, which holds images. Rows have the fields `images`, `problem` and `answer`, and the
    option `columns` renames them. A training row is dropped only if a held-out row has the same problem *and* the same
    answer: many diagrams share a text such as "Find x."

    Raises:
        TaskError: If the data cannot be reached or read, or a row lacks its images, its problem or its answer.
    """
    check_math_verify()
    columns = config.read_options(ColumnOptions).columns_of(_SOURCE)
    train, test = read_splits(config, _SOURCE)
    held_out, asked = _to_prompts(test, columns)
    first = train.select(range(len(train))[: config.train_size])
    return Task(
        name=config.task,
        train_dataset=_to_prompts(first, columns, exclude=asked)[0],
        # The other held-out rows are not trained on either: a larger eval_size must not find training rows.
        eval_dataset=held_out.select(range(len(held_out))[: config.eval_size]),
        held_out_questions={spaced_once(prompt) for prompt in held_out["prompt"]},
        reward_funcs=[MathGrader()],
    )


def _to_prompts(
    rows: Rows, columns: dict[str, Column], exclude: Collection[tuple[str, str]] = ()
) -> tuple[Dataset, set[tuple[str, str]]]:
    """The rows as prompts, and their pairs of a question and an answer."""
    if isinstance(rows.records, Dataset):  # not decoded: whether they are there is all that matters here
        undecoded = rows.records.cast_column(rows.columns(columns)["images"], List(Image(decode=False)))
        rows = replace(rows, records=undecoded)
    found: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    asked = set()
    for row in rows.read(columns):
        images = row.value("images")
        if not images or None in images:
            raise row.error(f"has no image in its field {row.columns['images']!r}")
        problem, answer = row.text("problem").replace(_PLACEHOLDER, "").strip(), row.answer("answer")
        asked.add((spaced_once(problem), answer))
        if (spaced_once(problem), answer) not in exclude:
            found["images"].append(images)
            found["prompt"].append(f"{problem}\n{INSTRUCTIONS['boxed']}")
            found["answer"].append(answer)
    return Dataset.from_dict(found, features=_FEATURES), asked
