"""The rows of a data set, whose fields are read by the task's names for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
            raise self._lacks("text", field, value)
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
            raise self._lacks("answer", field, value)
        return value.strip()

    def error(self, problem: str) -> TaskError:
        """Returns an error about this row, to be raised."""
        return TaskError(f"{self.place} {problem}")

    def _lacks(self, what: str, field: str, value: Any) -> TaskError:
        return self.error(f"has no {what} in its field {self.columns.get(field, field)!r}, got {value!r:.80}")


@dataclass(frozen=True)
class Rows:
    """Some rows of a file, or of a split of the hub.

    Attributes:
        dataset: The rows themselves.
        numbers: The place of each row in the file, counted from 0.
        split: `train` or `test`.
        origin: The path of the file, or the name on the hub.
    """

    dataset: Dataset
    numbers: Sequence[int]
    split: str
    origin: str

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, indices: Sequence[int], split: str | None = None) -> Rows:
        """Returns the rows at some indices."""
        numbers = [self.numbers[index] for index in indices]
        return replace(self, dataset=self.dataset.select(indices), numbers=numbers, split=split or self.split)

    def head(self, size: int | None) -> Rows:
        """Returns the first `size` rows; all for None."""
        return self if size is None or size >= len(self) else self.select(range(size))

    def columns(self, wanted: Mapping[str, Column]) -> dict[str, str]:
        """Returns the name of the data set's column for each of a task's fields that has one.

        Raises:
            TaskError: If a required column is missing; names it and the columns of the data.
        """
        found = {}
        for field, column in wanted.items():
            there = next((name for name in column.names if _has(self.dataset.features, name)), None)
            if there is not None:
                found[field] = there
            elif column.required:
                raise TaskError(
                    f"the {self.split} rows of {self.origin} have no column {' or '.join(map(repr, column.names))}, "
                    f"only {', '.join(self.dataset.column_names)}; name it with task_options "
                    f"{{columns: {{{field}: NAME}}}}"
                )
        return found

    def read(self, wanted: Mapping[str, Column]) -> Iterator[Row]:
        """Yields the rows, to be read by the task's names for their fields.

        Raises:
            TaskError: If a required column is missing.
        """
        columns = self.columns(wanted)
        for number, values in zip(self.numbers, self.dataset, strict=True):
            yield Row(values, columns, f"{self.split} row {number} (counted from 0) of {self.origin}")


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
