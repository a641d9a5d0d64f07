"""The rows of a data set, whose fields are read by the task's names for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Value

from troll_lab.tasks.registry import TaskError
from troll_lab.tasks.written import WrittenRows, value_at

#: The whole numbers from which on a float skips some, by the type of its column.
_SKIPS = {"float16": 2**11, "float32": 2**24, "float64": 2**53}

#: The type of a column whose numbers stand for names.
_CLASS = "class"

_QUOTE = "write the answers of this column as text, in quotes"


class UnfitColumn(TaskError):
    """An answer of a wrong type, as probably all of its column are: to leave out rows is not what a user wants."""


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
        number: The place of the row in its file, counted from 0.
        written: The rows of a JSON file as they are written there.
        types: The type of each field's column, such as `float64`.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    place: str
    number: int = 0
    written: WrittenRows | None = None
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def value(self, field: str) -> Any:
        """Returns the value of a field; None if it has no column."""
        column = self.columns.get(field)
        if column is None:
            return None
        value = value_at(self.values, column)
        if self.written is not None and (value is None or _may_be_changed(value)):
            try:
                return self.written.value(self.number, column)
            except ValueError as error:
                raise UnfitColumn(f"the numbers in the field {column!r} cannot be read exactly: {error}") from error
        return value

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
        """Returns the answer in a field as text: 27.0 as `27`, 0.1 as `0.1`, and long numbers as they are written.

        Raises:
            UnfitColumn: If it is a truth value, a date or a time, bytes, a list or another value that holds several,
                the number of a class, or a number that its column has rounded.
            TaskError: If there is none.
        """
        value = self.value(field)
        if isinstance(value, bool):
            raise self.unfit(field, "true or false", value)
        if isinstance(value, date | time | timedelta):
            raise self.unfit(field, "a date or a time", value)
        if isinstance(value, list | Mapping):
            inner = "name one that holds one answer, or write the answers as text"
            raise self.unfit(field, "a list" if isinstance(value, list) else "several fields", value, inner)
        if isinstance(value, bytes):
            raise self.unfit(field, "bytes", value)
        if self.types.get(field) == _CLASS and value is not None:
            raise self.unfit(field, "the number of a class", value)
        if isinstance(value, float) and math.isfinite(value):
            value = self._number(field, value)
        if isinstance(value, Decimal) and value.is_finite():
            return _plain(value)
        if isinstance(value, int):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self._lacks("answer", field, value)
        return value.strip()

    def _number(self, field: str, value: float) -> Decimal | str:
        """The number that a float stands for, by its shortest text."""
        kind = self.types.get(field, "")
        if self.written is None and abs(value) >= _SKIPS.get(kind, _SKIPS["float64"]):
            raise self.unfit(field, f"a whole number in a column of {kind}, which rounds numbers of this size", value)
        text = str(np.float32(value)) if kind == "float32" else str(np.float16(value)) if kind == "float16" else None
        text = str(value) if text is None else text
        return Decimal(text) if float(text).is_integer() else text

    def unfit(self, field: str, what: str, value: Any, remedy: str = _QUOTE) -> UnfitColumn:
        """Returns an error about the type of a field's column, to be raised."""
        column = self.columns.get(field, field)
        return UnfitColumn(f"{self.place} has no answer in its field {column!r}, but {what}, {value!s:.80}: {remedy}")

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
        written: The rows of a JSON file as they are written there.
    """

    dataset: Dataset
    numbers: Sequence[int]
    split: str
    origin: str
    written: WrittenRows | None = None

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
        types = {field: _type(self.dataset.features, column) for field, column in columns.items()}
        for number, values in zip(self.numbers, self.dataset, strict=True):
            place = f"{self.split} row {number} (counted from 0) of {self.origin}"
            yield Row(values, columns, place, number, self.written, types)


def _has(features: Any, name: str) -> bool:
    if not isinstance(features, Mapping):
        return False
    first, dot, rest = name.partition(".")
    return name in features or (bool(dot) and first in features and _has(features[first], rest))


def _type(features: Any, name: str) -> str:
    """The type of a column by its name; empty for one that holds no single values."""
    feature = value_at(features, name)
    if isinstance(feature, ClassLabel):
        return _CLASS
    return str(feature.dtype) if isinstance(feature, Value) else ""


def _may_be_changed(value: Any) -> bool:
    """Whether `datasets` may have read something else than is written in a JSON file."""
    if isinstance(value, Mapping):
        return any(map(_may_be_changed, value.values()))
    if isinstance(value, list):
        return any(map(_may_be_changed, value))
    return isinstance(value, float | date)


def _plain(value: Decimal) -> str:
    """A number without an exponent, unless that has more than 100 digits, and without a fraction of 0."""
    if abs(value.adjusted()) > 100:
        return str(value).lower()
    text = f"{abs(value) if value.is_zero() else value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
