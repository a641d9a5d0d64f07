"""One row of a data set, read by a task's names for its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from troll.tasks.registry import TaskError


@dataclass(frozen=True)
class Column:
    """The column of a task's field.

    Attributes:
        names: Names of columns in order of preference; a dot leads into a nested one, as in
            `reward_model.ground_truth`.
        required: Whether the data must have one of them.
    """

    names: tuple[str, ...]
    required: bool = True


def columns_of(dataset: Dataset, wanted: Mapping[str, Column], rows: str) -> dict[str, str]:
    """Finds the columns of a task's fields.

    Args:
        dataset: The rows of the data set.
        wanted: The columns by the task's names for them.
        rows: The name of the rows in an error.

    Returns:
        The name of the column for each field that has one.

    Raises:
        TaskError: If a required column is missing; names it and the columns of the data.
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
        values: The values of the row by the data set's columns.
        columns: The data set's columns for the task's fields.
        place: The place of the row in words, for errors.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    place: str

    def value(self, field: str) -> Any:
        """Returns the value of a field; None if it has no column."""
        column = self.columns.get(field)
        return None if column is None else _at(self.values, column)

    def text(self, field: str) -> str:
        """Returns the text of a field, or of the user's message if the field holds a conversation with only one.

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
            raise self.error(f"has no text in its field {self._name(field)}, got {value!r:.80}")
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
            raise self.error(f"has no answer in its field {self._name(field)}, got {value!r:.80}")
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
