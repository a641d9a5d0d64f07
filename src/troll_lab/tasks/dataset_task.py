"""Makes a task from the rows of a data set, by the options of the user."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, concatenate_datasets

from troll_lab.rewards.answers import AnswerFormat, FormatReward
from troll_lab.tasks.registry import CHAT_PROMPT, Reward, Task, TaskConfig, TaskError, spaced_once
from troll_lab.tasks.rows import Column, Row, Rows, UnfitColumn
from troll_lab.tasks.splits import Source, read_splits

_PLACEHOLDER = re.compile(r"\{(question|instruction)\}")
# Arrow's 32-bit offsets allow 2 GiB of text in a column: a few thousand rows, if their tests are long.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Kind:
    """The kind of value that an option takes.

    Attributes:
        words: The end of the sentence "it must be ...".
        fits: Whether a value is of this kind.
    """

    words: str
    fits: Callable[[Any], bool]

    def checked(self, name: str, value: Any) -> Any:
        """Returns the value of an option; raises TaskError if it is not of this kind."""
        if not self.fits(value):
            raise TaskError(f"task option {name} must be {self.words}, got {value!r}")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number above 0", _is_number)
TEXTS = Kind("a list of texts", _are_texts)
PAIRS = Kind(
    'a list of pairs of texts, such as [["3 + 4 =", "7"]]',
    lambda value: isinstance(value, list) and all(_are_texts(each) and len(each) == 2 for each in value),
)
COLUMNS = Kind(
    "a mapping of names, such as {prompt: question, answer: solution}",
    lambda value: isinstance(value, dict) and _are_texts(list(value.values())),
)
OVERLONG = Kind(
    "a mapping with length and cache, two numbers above 0 of which cache is the smaller one",
    lambda value: (
        isinstance(value, dict)
        and sorted(value) == ["cache", "length"]
        and all(map(_is_number, value.values()))
        and value["cache"] < value["length"]
    ),
)


def one_of(choices: Sequence[str]) -> Kind:
    """One of several texts."""
    return Kind(f"one of {', '.join(choices)}", lambda value: value in choices)


def whole_number(least: int = 1) -> Kind:
    """A whole number of at least `least`."""
    return Kind(
        f"a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


class Options:
    """Reads `task_options`, one by one; options that are left over are errors.

    Args:
        config: The task's configuration, with its `task_options`.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._task = config.task
        self._given = config.options
        self._known: list[str] = []

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """Takes an option, or its default; raises TaskError if it is not of its kind."""
        self._known.append(name)
        value = self._given.pop(name, default)
        return value if value is default else kind.checked(name, value)

    def columns(self, defaults: Mapping[str, Column]) -> dict[str, Column]:
        """Takes `columns`, the names of the data's columns for the task's fields."""
        given = self.take("columns", COLUMNS, {})
        for name in given:
            if name not in defaults:
                raise TaskError(f"task {self._task!r} reads no column {name!r}; it reads {', '.join(defaults)}")
        return {name: Column((given[name],)) if name in given else defaults[name] for name in defaults}

    @property
    def left(self) -> dict[str, Any]:
        """The options that were not taken."""
        return dict(self._given)

    def finish(self) -> None:
        """Refuses options that were not taken."""
        for name in self._given:
            known = f"it has {', '.join(self._known)}" if self._known else "it takes none"
            raise TaskError(f"task {self._task!r} has no option {name!r}; {known}")


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
    options: Options,
    *,
    read: Read,
    style: PromptStyle,
    rewards: Iterable[tuple[Reward, float]],
    skip_unanswered: bool = False,
) -> Task:
    """Makes a task from a data set.

    It takes the options `prompt` (one template for plain texts and messages), `system_prompt`, `examples`, `columns`
    and `skip_unanswered`, and refuses the others. Training rows with a held-out question are dropped, regardless of
    spacing, and so are rows that repeat another one in every column that is read.

    Args:
        config: The path of the data, and the sizes.
        source: The data set, with the columns to read unless the option names others.
        options: The options of the task, without those that the caller has taken.
        read: A function that returns a row's example; raises TaskError if the row lacks something.
        style: The templates of prompts, unless the option `prompt` is set.
        rewards: The rewards, each with its weight; the first is named `success`. They are made after the options are
            checked.
        skip_unanswered: Whether rows that lack something are left out by default; otherwise they are an error.

    Returns:
        The task. Its data sets have the column `prompt`, the columns of the examples, and `chat_prompt` if it differs.

    Raises:
        TaskError: If an option is unknown or unusable, the data cannot be reached or read, or a row lacks something
            that is read.
    """
    template = options.take("prompt", TEXT)
    if template is not None and "{question}" not in template:
        raise TaskError(f"task option prompt must have the placeholder {{question}}, got {template!r}")
    style = style if template is None else replace(style, plain=template, chat=None)
    system_prompt, examples = options.take("system_prompt", TEXT), options.take("examples", PAIRS, [])
    columns = options.columns(source.columns)
    skip_unanswered = options.take("skip_unanswered", FLAG, skip_unanswered)
    options.finish()
    weighted = list(rewards)
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
        reward_funcs=[reward for reward, _ in weighted],
        reward_weights=[weight for _, weight in weighted] if len(weighted) > 1 else None,
        system_prompt=system_prompt,
        examples=[(first, second) for first, second in examples],
        train_questions=[spaced_once(example.question) for example in learned],
        held_out_questions=asked,
        references=[example.reference for example in (*learned, *held_out[: config.eval_size])],
        hub_dataset=None if config.dataset_path or source.path else source.name,
    )


def take_shaping(options: Options, answer_format: AnswerFormat | None) -> list[tuple[Reward, float]]:
    """Takes the options that shape the form of a completion.

    `format_reward` is the weight of a reward of 1 for an answer in the required format. `overlong` is DAPO's soft
    punishment of long completions, in tokens: 0 up to `length - cache`, falling to -1 at `length`.

    Args:
        options: The options of the task.
        answer_format: The required format; None for a task without one, which has no `format_reward`.

    Returns:
        The rewards, each with its weight.

    Raises:
        TaskError: If an option is unusable.
    """
    rewards: list[tuple[Reward, float]] = []
    if answer_format is not None and (weight := options.take("format_reward", NUMBER)) is not None:
        rewards.append((FormatReward(answer_format), weight))
    if (overlong := options.take("overlong", OVERLONG)) is not None:
        from trl.rewards import get_soft_overlong_punishment

        rewards.append((get_soft_overlong_punishment(int(overlong["length"]), int(overlong["cache"])), 1.0))
    return rewards


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
