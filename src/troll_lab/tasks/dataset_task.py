"""Makes a task from the rows of a data set, by the options of the user."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from datasets import Dataset, concatenate_datasets

from troll.settings import number
from troll_lab.tasks.registry import CHAT_PROMPT, Reward, Task, TaskConfig, TaskError, spaced_once
from troll_lab.tasks.rows import Column, Row, Rows, UnfitColumn
from troll_lab.tasks.splits import Source, read_splits

_PLACEHOLDER = re.compile(r"\{(question|instruction)\}")
# Arrow's 32-bit offsets allow 2 GiB of text in a column: a few thousand rows, if their tests are long.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class ColumnOptions:
    """The option of every task with a data set.

    Attributes:
        columns: The names of the data's columns, by the task's names for them.
    """

    columns: dict[str, str] = field(default_factory=dict)

    def columns_of(self, source: Source) -> dict[str, Column]:
        """The columns to read; raises TaskError if the option names one that the task does not read."""
        for name in self.columns:
            if name not in source.columns:
                raise TaskError(f"task option columns: no column {name!r} is read, only {', '.join(source.columns)}")
        return {**source.columns, **{name: Column((given,)) for name, given in self.columns.items()}}


@dataclass(frozen=True)
class Overlong:
    """The option `overlong`: DAPO's soft punishment of long completions.

    Attributes:
        length: The number of tokens from which on the reward is -1.
        cache: The tokens before, over which the reward falls from 0.
    """

    length: int = number(0, "an integer, at least 1")  # 0 stands for a number that is missing
    cache: int = number(0, "an integer, at least 1")

    def __post_init__(self) -> None:
        if not 0 < self.cache < self.length:
            raise TaskError(f"task option overlong must have a length and a smaller cache, got {asdict(self)}")


@dataclass(frozen=True)
class DatasetOptions(ColumnOptions):
    """The options of `dataset_task`.

    Attributes:
        prompt: One template for plain texts and messages, with `{question}`; None for the task's own.
        system_prompt: As in `Task`.
        examples: As in `Task`.
        skip_unanswered: Whether rows that lack something are left out; otherwise they are an error.
        overlong: A punishment of long completions, as a further reward; None for none.
    """

    prompt: str | None = None
    system_prompt: str | None = None
    examples: list[tuple[str, str]] = field(default_factory=list)
    skip_unanswered: bool = False
    overlong: Overlong | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and "{question}" not in self.prompt:
            raise TaskError(f"task option prompt must have the placeholder {{question}}, got {self.prompt!r}")


@dataclass(frozen=True)
class Example:
    """The fields of a data set's row that a task uses.

    Attributes:
        question: The text of the question.
        columns: The columns that the rewards read, by the rewards' names.
        reference: A solution, if the data set has one: for code, a program without the text of the column `prefix`.
    """

    question: str
    columns: dict[str, str]
    reference: str | None = None


Read = Callable[[Row], Example]


@dataclass(frozen=True)
class PromptStyle:
    """The templates that make a prompt from a question.

    Attributes:
        plain: The template of a plain text, with `{question}` and optionally `{instruction}`.
        instruction: The sentence that asks for the format of the answer.
        chat: The template of a message, with the same placeholders; None for that of a plain text.
    """

    plain: str
    instruction: str = ""
    chat: str | None = None

    def fill(self, template: str, question: str) -> str:
        """Returns a template with its placeholders filled. All other braces stay, since mathematics uses them."""
        values = {"question": question, "instruction": self.instruction}
        return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def dataset_task(
    config: TaskConfig,
    source: Source,
    options: DatasetOptions,
    *,
    read: Read,
    style: PromptStyle,
    rewards: Sequence[tuple[Reward, float]],
) -> Task:
    """Makes a task from a data set.

    Training rows with a held-out question are dropped, regardless of spacing, and so are rows that repeat another one
    in every column that is read.

    Args:
        config: The path of the data, and the sizes.
        source: The data set, with the columns to read unless the option names others.
        options: The options of the task.
        read: A function that returns a row's example; raises TaskError if the row lacks something.
        style: The templates of prompts, unless the option `prompt` is set.
        rewards: The rewards, each with its weight; the first is named `success`.

    Returns:
        The task. Its data sets have the column `prompt`, the columns of the examples, and `chat_prompt` if it differs.

    Raises:
        TaskError: If a column is unknown, the data cannot be reached or read, or a row lacks something that is read.
    """
    style = style if options.prompt is None else replace(style, plain=options.prompt, chat=None)
    columns, skip_unanswered = options.columns_of(source), options.skip_unanswered
    if options.overlong is not None:
        from trl.rewards import get_soft_overlong_punishment

        rewards = [*rewards, (get_soft_overlong_punishment(options.overlong.length, options.overlong.cache), 1.0)]
    train, test = read_splits(config, source)
    held_out = _examples(test, columns, read, skip_unanswered)
    # All held-out rows, not only those that are evaluated: a larger eval_size must not find training rows.
    asked = {spaced_once(example.question) for example in held_out}
    learned = _examples(train, columns, read, skip_unanswered, config.train_size, exclude=asked)
    eval_dataset = _dataset(held_out[: config.eval_size], style)
    return Task(
        name=config.task,
        train_dataset=_dataset(learned, style) if learned else eval_dataset.select([]),
        eval_dataset=eval_dataset,
        reward_funcs=[reward for reward, _ in rewards],
        reward_weights=[weight for _, weight in rewards] if len(rewards) > 1 else None,
        system_prompt=options.system_prompt,
        examples=options.examples,
        train_questions=[spaced_once(example.question) for example in learned],
        held_out_questions=asked,
        references=[example.reference for example in (*learned, *held_out[: config.eval_size])],
        hub_dataset=None if config.dataset_path or source.path else source.name,
    )


def without(text: str, *instructions: str) -> str:
    """Returns a text without instructions at its start or end, regardless of their spacing."""
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
    """The first `size` examples; with `exclude`, without its questions and without repetitions."""
    examples: list[Example] = []
    seen: set[tuple[str, ...]] = set()
    left_out: list[str] = []
    count = 0
    for row in rows.read(columns):
        count += 1
        try:
            example = read(row)
        except TaskError as error:
            if skip_unanswered:
                left_out.append(str(error))
                continue
            if isinstance(error, UnfitColumn):
                raise
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
    parts = []
    for start in range(0, len(examples), _ROWS_AT_ONCE):
        part = examples[start : start + _ROWS_AT_ONCE]
        columns: dict[str, list[Any]] = {"prompt": [style.fill(style.plain, example.question) for example in part]}
        if style.chat is not None:
            columns[CHAT_PROMPT] = [style.fill(style.chat, example.question) for example in part]
        columns |= {name: [example.columns[name] for example in part] for name in part[0].columns}
        parts.append(Dataset.from_dict(columns))
    return concatenate_datasets(parts) if parts else Dataset.from_dict({"prompt": []})
