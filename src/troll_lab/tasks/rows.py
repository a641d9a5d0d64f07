"""The rows of a data set, whose fields are read as texts by the task's names for them.

`Rows.read` yields a `Row` for each. Numbers keep all the digits that are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from datasets import ClassLabel, Dataset, Value

from troll_lab.tasks.registry import TaskError

#: Rows of a Parquet file or the hub, or those of a JSON file as Python's values.
Records: TypeAlias = Dataset | Sequence[Mapping[str, Any]]

#: Types of values that cannot be answers, in words.
_UNFIT: dict[type | tuple[type, ...], str] = {
    bool: "true or false",
    (date, time, timedelta): "a date or a time",
    bytes: "bytes",
}

_MISSING = object()

_QUOTE = "write the answers of this column as text, in quotes"


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
class Rows:
    """Some rows of a file, or of a split of the hub.

    Attributes:
        records: The rows themselves.
        features: The types of the file's columns by name, with nested columns in nested dictionaries. In a JSON file,
            every type is None.
        numbers: The place of each row in the file, counted from 0.
        split: `train` or `test`.
        origin: The path of the file, or the name on the hub.
    """

    records: Records
    features: Mapping[str, Any]
    numbers: Sequence[int]
    split: str
    origin: str

    @classmethod
    def of(cls, records: Records, split: str, origin: str) -> Rows:
        """All rows of a file or a split."""
        features = records.features if isinstance(records, Dataset) else _names(records)
        return cls(records, features, range(len(records)), split, origin)

    def __len__(self) -> int:
        return len(self.numbers)

    def values(self, column: str) -> list[Any]:
        """Returns the values of a column; none if the column is missing."""
        if column not in self.features:
            return []
        if isinstance(self.records, Dataset):
            return list(self.records[column])
        return [record.get(column) for record in self.records]

    def select(self, indices: Sequence[int], split: str | None = None) -> Rows:
        """Returns the rows at some indices."""
        records = self.records
        chosen = records.select(indices) if isinstance(records, Dataset) else [records[index] for index in indices]
        numbers = [self.numbers[index] for index in indices]
        return replace(self, records=chosen, numbers=numbers, split=split or self.split)

    def columns(self, wanted: Mapping[str, Column]) -> dict[str, str]:
        """Returns the name of the data set's column for each of a task's fields that has one.

        Raises:
            TaskError: If a required column is missing; names it and the columns of the data.
        """
        found = {}
        for name, column in wanted.items():
            there = [each for each in column.names if _value_at(self.features, each, _MISSING) is not _MISSING]
            if there:
                found[name] = there[0]
            elif column.required:
                raise TaskError(
                    f"the {self.split} rows of {self.origin} have no column {' or '.join(map(repr, column.names))}, "
                    f"only {', '.join(self.features)}; name it with task_options {{columns: {{{name}: NAME}}}}"
                )
        return found

    def read(self, wanted: Mapping[str, Column]) -> Iterator[Row]:
        """Yields the rows, to be read by the task's names for their fields.

        Raises:
            TaskError: If a required column is missing.
        """
        if not len(self):
            return
        columns = self.columns(wanted)
        features = {name: _value_at(self.features, column) for name, column in columns.items()}
        records: Iterable[Any] = self.records
        for number, values in zip(self.numbers, records, strict=True):
            yield Row(values, columns, f"{self.split} row {number} (counted from 0) of {self.origin}", features)


def _names(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of the rows of a JSON file, as in `Rows.features`."""
    names: dict[str, Any] = {}
    objects: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for name, value in record.items():
            names[name] = None
            if isinstance(value, Mapping):
                objects.setdefault(name, []).append(value)
    return names | {name: _names(values) for name, values in objects.items()}


def _value_at(columns: Any, name: str, default: Any = None) -> Any:
    """The value of a column of a row, or its type among a data set's; a dot in its name leads into a nested one."""
    if not isinstance(columns, Mapping):
        return default
    if name in columns:
        return columns[name]
    first, _, rest = name.partition(".")
    return _value_at(columns.get(first), rest, default) if rest else default


class UnfitColumn(TaskError):
    """An answer of a wrong type. Probably the whole column has it, so leaving out rows would not help."""


@dataclass(frozen=True)
class Row:
    """A row; every error of its methods names it and the column.

    Attributes:
        values: The values of the row by the data set's columns.
        columns: The data set's columns for the task's fields.
        place: The place of the row in words, for errors.
        features: The type of each field's column; None in a JSON file, whose values are what is written there.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    place: str
    features: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Returns the value of a field; None if it has no column."""
        return _value_at(self.values, self.columns[name]) if name in self.columns else None

    def text(self, name: str) -> str:
        """Returns the text of a field, or of the user's message if the field holds a conversation with only one.

        A system message before it is left out.

        Raises:
            TaskError: If there is none.
        """
        value = self.value(name)
        match value:
            case [{"role": "user", "content": str(said)}] | [
                {"role": "system"},
                {"role": "user", "content": str(said)},
            ]:
                value = said
        return self._checked(name, value, "text")

    def answer(self, name: str) -> str:
        """Returns the answer in a field as text: 27.0 as `27`, 0.1 as `0.1`, and long numbers as they are written.

        Raises:
            UnfitColumn: If it is a boolean, a date or a time, bytes, a list or another value that holds several,
                the number of a class, or a number that its column has rounded.
            TaskError: If there is none.
        """
        value, feature = self.value(name), self.features.get(name)
        if isinstance(value, list | Mapping):
            what = "a list" if isinstance(value, list) else "several fields"
            raise self.unfit(name, what, "name one that holds one answer, or write the answers as text")
        for types, what in _UNFIT.items():
            if isinstance(value, types):
                raise self.unfit(name, what)
        if isinstance(feature, ClassLabel) and value is not None:
            raise self.unfit(name, "the number of a class")
        if isinstance(value, float) and math.isfinite(value):
            kind = feature.dtype if isinstance(feature, Value) else "float64"
            skips = 2 ** (np.finfo(kind).nmant + 1)  # above it, floats skip whole numbers
            if isinstance(feature, Value) and abs(value) >= skips:
                raise self.unfit(name, f"a whole number in a column of {kind}, which rounds numbers of this size")
            text = str(np.dtype(kind).type(value))
            value = Decimal(text) if value.is_integer() else text
        if isinstance(value, Decimal) and value.is_finite():
            return _plain(value)
        if isinstance(value, int):
            return str(value)
        return self._checked(name, value, "answer").strip()

    def unfit(self, name: str, what: str, remedy: str = _QUOTE) -> UnfitColumn:
        """Returns an error about the type of a field's column, to be raised."""
        found = f"{what}, {self.value(name)!s:.80}"
        return UnfitColumn(f"{self.place} has no answer in its field {self.columns[name]!r}, but {found}: {remedy}")

    def error(self, problem: str) -> TaskError:
        """Returns an error about this row, to be raised."""
        return TaskError(f"{self.place} {problem}")

    def _checked(self, name: str, value: Any, what: str) -> str:
        # JSON can write lone surrogates, which neither a tokenizer nor a file takes.
        if isinstance(value, str) and value.strip() and not re.search("[\ud800-\udfff]", value):
            return value
        raise self.error(f"has no {what} in its field {self.columns.get(name, name)!r}, got {value!r:.80}")


def _plain(value: Decimal) -> str:
    """A number without an exponent, unless that has more than 100 digits, and without a fraction of 0."""
    if abs(value.adjusted()) > 100:
        return str(value).lower()
    text = f"{abs(value) if value.is_zero() else value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
