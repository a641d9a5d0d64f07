"""One row of a data set, read by the names that a task has for its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from troll.tasks.registry import TaskError


@dataclass(frozen=True)
class Column:
    """Where a field of a task stands in its data.

    Attributes:
        names: Columns in order of preference; dots lead into nested ones, as in `reward_model.ground_truth`.
        required: Whether one of them must be there.
    """

    names: tuple[str, ...]
    required: bool = True


def columns_of(dataset: Dataset, wanted: Mapping[str, Column], rows: str) -> dict[str, str]:
    """Finds the columns of a task's fields.

    Args:
        dataset: The data.
        wanted: The columns by the task's names for them.
        rows: What the data is called in an error.

    Returns:
        The column of each field that has one.

    Raises:
        TaskError: If a required one is missing; names it and the columns there are.
    """
    found = {}
    for field, column in wanted.items():
        there = [name for name in column.names if _has(dataset.features, name)]
        if there:
            found[field] = there[0]
        elif column.required:
            raise TaskError(
                f"{rows} have no column {' or '.join(map(repr, column.names))}, only "
                f"{', '.join(dataset.column_names)}; name it with task_options {{columns: {{{field}: NAME}}}}"
            )
    return found


@dataclass(frozen=True)
class Row:
    """A row; every error of its methods names it and the column.

    Attributes:
        values: The row as the data set has it.
        columns: The columns of the task's fields.
        place: The row in words.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    place: str

    def value(self, field: str) -> Any:
        """Returns what stands in a field; None where it has no column."""
        column = self.columns.get(field)
        return None if column is None else _at(self.values, column)

    def text(self, field: str) -> str:
        """Returns the text of a field, or of the user's message where it holds a conversation of one.

        A system message before it is left out.

        Raises:
            TaskError: If there is none.
        """
        value = self.value(field)
        match value:
            case [{"role": "user", "content": str(said)}] | [
                {"role": "system"},
                {"role": "user", "content": str(said)},
            ]:
                value = said
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"has no text in its field {self._name(field)}, got {_short(value)}")
        return value

    def answer(self, field: str) -> str:
        """Returns the answer in a field as text: 27.0 as `27`, 0.1 as `0.1`.

        Raises:
            TaskError: If there is none.
        """
        value = self.value(field)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"has no answer in its field {self._name(field)}, got {_short(value)}")
        return value.strip()

    def error(self, problem: str) -> TaskError:
        """Returns an error about this row, to be raised."""
        return TaskError(f"{self.place} {problem}")

    def _name(self, field: str) -> str:
        return repr(self.columns.get(field, field))


def _has(features: Any, name: str) -> bool:
    if not isinstance(features, Mapping):
        return False
    first, dot, rest = name.partition(".")
    return name in features or (bool(dot) and first in features and _has(features[first], rest))


def _at(values: Any, name: str) -> Any:
    if not isinstance(values, Mapping):
        return None
    if name in values:
        return values[name]
    first, _, rest = name.partition(".")
    return _at(values.get(first), rest) if rest else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
