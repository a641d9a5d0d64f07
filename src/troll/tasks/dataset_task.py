"""From the rows of a data set to the prompts of a task."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, concatenate_datasets

from troll.tasks.options import Options
from troll.tasks.registry import CHAT_PROMPT, Reward, Task, TaskConfig, TaskError, spaced_once
from troll.tasks.row import Column, Row
from troll.tasks.splits import Divide, Rows, Source, read_splits

_PLACEHOLDER = re.compile(r"\{(question|instruction)\}")
# Of rows with megabytes of tests, Arrow's 32-bit offsets hold a few thousand.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Example:
    """A row, as a task reads it.

    Attributes:
        question: What is asked.
        columns: What the rewards read, by their names for it.
        reference: A solution, where the data set has one: of code a program, without what the column `prefix` holds.
    """

    question: str
    columns: dict[str, str]
    reference: str | None = None


Read = Callable[[Row], Example]


@dataclass(frozen=True)
class PromptStyle:
    """How a question becomes a prompt.

    Attributes:
        plain: Template of a plain text, with `{question}` and, where one is given, `{instruction}`.
        chat: Template of a message; the same by default.
        instruction: How the answer is to be written.
    """

    plain: str
    chat: str
    instruction: str

    def with_options(self, options: Options) -> PromptStyle:
        """Takes the option `prompt`, a template for both.

        Raises:
            TaskError: If it has no `{question}`.
        """
        template = options.text("prompt")
        if template is None:
            return self
        if "{question}" not in template:
            raise TaskError(f"task option prompt must have the placeholder {{question}}, got {template!r}")
        return replace(self, plain=template, chat=template)

    def fill(self, template: str, question: str) -> str:
        """Returns a template with its placeholders filled; all other braces stay, as mathematics is full of them."""
        values = {"question": question, "instruction": self.instruction}
        return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def dataset_task(
    config: TaskConfig,
    source: Source,
    *,
    columns: Mapping[str, Column],
    read: Read,
    style: PromptStyle,
    rewards: Sequence[Reward],
    skip_unanswered: bool = False,
    system_prompt: str | None = None,
    reward_weights: list[float] | None = None,
    divide: Divide | None = None,
) -> Task:
    """Makes a task of a data set.

    A question that is held out is dropped from training, however it is spaced, and so is a row that repeats another one
    in all that is read of it.

    Args:
        config: Path and sizes.
        source: The hub's data set.
        columns: What is read of a row.
        read: Returns a row's example; raises TaskError where the row lacks something.
        style: Of the prompts.
        rewards: The first is named `success`.
        skip_unanswered: Whether a row that lacks something is left out.
        system_prompt: See `Task`.
        reward_weights: See `Task`.
        divide: See `read_splits`.

    Returns:
        The task. Its data sets have the column `prompt`, those of the examples, and `chat_prompt` where it differs.

    Raises:
        TaskError: If the data cannot be reached or read, or a row lacks what is read.
    """
    train, test = read_splits(config, source, divide)
    held_out = _examples(test, columns, read, skip_unanswered)
    # All of it, not only what is evaluated: a larger eval_size must not find what was learned.
    asked = {spaced_once(example.question) for example in held_out}
    learned = _examples(train, columns, read, skip_unanswered, config.train_size, exclude=asked)
    eval_dataset = _dataset(held_out[: config.eval_size], style)
    return Task(
        name=config.task,
        train_dataset=_dataset(learned, style) if learned else eval_dataset.select([]),
        eval_dataset=eval_dataset,
        reward_funcs=list(rewards),
        reward_weights=reward_weights,
        system_prompt=system_prompt,
        train_questions=[spaced_once(example.question) for example in learned],
        held_out_questions=asked,
        references=[example.reference for example in (*learned, *held_out[: config.eval_size])],
        hub_dataset=None if config.dataset_path else source.name,
    )


def without(text: str, *instructions: str) -> str:
    """Returns a text without instructions at its start or end, however they are spaced."""
    for instruction in instructions:
        pattern = r"\s+".join(map(re.escape, instruction.split()))
        text = re.sub(rf"^\s*{pattern}|{pattern}\s*$", "", text)
    return text.strip()


def _examples(
    rows: Rows,
    columns: Mapping[str, Column],
    read: Read,
    skip_unanswered: bool,
    size: int | None = None,
    exclude: set[str] | None = None,
) -> list[Example]:
    """The first examples; with `exclude`, those of other questions, each once."""
    examples: list[Example] = []
    seen: set[tuple[str, ...]] = set()
    left_out: list[str] = []
    count = 0
    if not len(rows):
        return examples
    for row in rows.read(columns):
        count += 1
        try:
            example = read(row)
        except TaskError as error:
            if skip_unanswered:
                left_out.append(str(error))
                continue
            raise TaskError(f"{error}; task_options {{skip_unanswered: true}} leaves such rows out") from error
        if exclude is not None:
            key = (spaced_once(example.question), *example.columns.values())
            if key[0] in exclude or key in seen:
                continue
            seen.add(key)
        examples.append(example)
        if len(examples) == size:
            break
    if left_out:
        warnings.warn(f"{len(left_out)} of {count} rows left out; the first: {left_out[0]}", stacklevel=2)
    return examples


def _dataset(examples: Sequence[Example], style: PromptStyle) -> Dataset:
    parts = [
        Dataset.from_dict(_columns(examples[start : start + _ROWS_AT_ONCE], style))
        for start in range(0, len(examples), _ROWS_AT_ONCE)
    ]
    return concatenate_datasets(parts) if parts else Dataset.from_dict({"prompt": []})


def _columns(examples: Sequence[Example], style: PromptStyle) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"prompt": [style.fill(style.plain, example.question) for example in examples]}
    if style.chat != style.plain:
        columns[CHAT_PROMPT] = [style.fill(style.chat, example.question) for example in examples]
    for name in examples[0].columns:
        columns[name] = [example.columns[name] for example in examples]
    return columns
