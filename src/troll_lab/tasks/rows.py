"""The rows of a data set: loaded from a file or the hub, divided into training and held-out rows, and read.

`read_splits` is the way in. It returns `Rows`, whose method `read` yields a `Row` for each. A `Row` returns its fields
by the task's names for them, as texts. Numbers keep all the digits that are written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Value, load_dataset

from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, TaskConfig, TaskError
from troll_lab.values import unique_keys

_SUFFIXES = (".json", ".jsonl", ".parquet")
_NO_SPACE = re.compile(r"\S")

#: The number of digits up to which every Python converts a text to an int.
_LONGEST_INT = 640

#: Above these numbers, by the type of their column, floats skip whole numbers.
_SKIPS = {"float16": 2**11, "float32": 2**24, "float64": 2**53}

#: Types of values that cannot be answers, in words.
_UNFIT: dict[type | tuple[type, ...], str] = {
    bool: "true or false",
    (date, time, timedelta): "a date or a time",
    bytes: "bytes",
}

#: The type of a column whose numbers stand for names.
_CLASS = "class"

_MISSING = object()

_QUOTE = "write the answers of this column as text, in quotes"


@dataclass(frozen=True)
class Source:
    """A data set of the hub.

    Attributes:
        name: Its name on the hub, e.g. `openai/gsm8k`.
        config: Its configuration, if it has several.
        train: The split to train on; None for a benchmark.
        held_out: The split to evaluate on; without it, the last `eval_size` rows of `train` are held out.
        only: A column and the value that rows of the task have in it; ignored where that column is missing.
        held_out_file: A local file with the rows to evaluate on, if another file has those to train on.
    """

    name: str
    config: str | None = None
    train: str | None = "train"
    held_out: str = "test"
    only: tuple[str, str] | None = None
    held_out_file: Path | None = None


#: Divides the rows of one file, by index, into training and held-out ones; returns None to hold out the last ones.
Divide = Callable[["Rows"], tuple[Sequence[int], Sequence[int]] | None]


def read_splits(config: TaskConfig, source: Source, divide: Divide | None = None) -> tuple[Rows, Rows]:
    """Reads training and held-out rows.

    They come from `config.dataset_path`: a folder with a train and a test file (`train.jsonl`,
    `test-00000-of-00001.parquet`, ...), or one file, whose last `eval_size` rows are then held out. Without a path,
    they come from the hub. For a benchmark, all rows of one file are held out. A folder without a train file has only
    rows to evaluate on.

    Args:
        config: The path, and the number of rows of one file to hold out. With an `eval_size` of None, these are as many
            as a run holds out by default, so that an evaluation on all rows does not include training rows.
        source: The hub's data set.
        divide: Divides one file as the data set's authors did; None to hold out the last rows.

    Returns:
        The rows to train on, and the held-out rows, which may be more than `eval_size`.

    Raises:
        TaskError: If the data cannot be reached or read, or there are too few rows.
    """
    train, test = _local(config, source, divide) if config.dataset_path else _from_hub(config, source)
    return _only(train, source), _only(test, source)


def _local(config: TaskConfig, source: Source, divide: Divide | None) -> tuple[Rows, Rows]:
    path = Path(str(config.dataset_path)).expanduser()
    if path.is_dir():
        test = _read_file(_one_file(path, "test"), "test")
        evaluates = source.train is None or not _files(path, "train")
        return test.select([], "train") if evaluates else _read_file(_one_file(path, "train"), "train"), test
    rows = _read_file(path, "train")
    if source.held_out_file is not None:
        return rows, _read_file(source.held_out_file, "test", field="eval_dataset")
    if source.train is None:
        return rows.select([]), replace(rows, split="test")
    parts = divide(rows) if divide is not None else None
    if parts is not None:
        return rows.select(parts[0]), rows.select(parts[1], "test")
    return _hold_out(_only(rows, source), config.eval_size)


def _from_hub(config: TaskConfig, source: Source) -> tuple[Rows, Rows]:
    try:
        splits = load_dataset(source.name, source.config)
    except Exception as error:  # see _reason
        if isinstance(error, OSError):
            remedy = "or give a local copy with --dataset_path (a file, or a folder with train.jsonl and test.jsonl)"
            why = f": connect to the network, {remedy}; {_reason(error)}"
        else:
            why = f", configuration {source.config or 'default'}: {_reason(error)}"
        raise TaskError(f"cannot load {source.name} from the Hugging Face hub{why}") from error
    first = source.held_out if source.train is None else source.train
    if first not in splits:
        raise TaskError(f"{source.name} has no split {first!r}, only {', '.join(splits)}")
    rows = _all(splits[first], "train", source.name)
    if source.train is None:
        return rows.select([]), replace(rows, split="test")
    if source.held_out in splits:
        return rows, _all(splits[source.held_out], "test", source.name)
    return _hold_out(_only(rows, source), config.eval_size)


def _only(rows: Rows, source: Source) -> Rows:
    if source.only is None or source.only[0] not in rows.features:
        return rows
    column, value = source.only
    return rows.select([index for index, found in enumerate(rows.values(column)) if found == value])


def _hold_out(rows: Rows, eval_size: int | None) -> tuple[Rows, Rows]:
    size = DEFAULT_EVAL_SIZE if eval_size is None else eval_size
    if len(rows) <= size:
        raise TaskError(
            f"{rows.origin} has {len(rows)} rows, not enough to hold out eval_size={size} of them: choose a smaller "
            "eval_size, that of the training run if there was one"
        )
    kept = len(rows) - size
    return rows.select(range(kept)), rows.select(range(kept, len(rows)), "test")


def _one_file(folder: Path, split: str) -> Path:
    files = _files(folder, split)
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise TaskError(f"{folder} must have one {split} file ({split}.jsonl, .json or .parquet), found {found}")
    return files[0]


def _files(folder: Path, split: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name.startswith(split))


def _read_file(path: Path, split: str, field: str = "dataset_path") -> Rows:
    if not path.is_file():
        raise TaskError(f"{field}: no such file or folder: {path}")
    if path.suffix not in _SUFFIXES:
        raise TaskError(f"{field}: {path} is not one of {', '.join(_SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            records = load_dataset("parquet", data_files=str(path), split="train")
        else:
            records = list(_json_objects(path))
        rows = _all(records, split, str(path))
    except Exception as error:  # see _reason
        raise TaskError(f"cannot read {path}: {_reason(error)}") from error
    if not len(rows):
        raise TaskError(f"cannot read {path}: it has no rows")
    return rows


def _json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON file, which stand one after another, or in a list.

    `datasets` has a reader too, but it changes answers: numbers of a column with one fraction become 64-bit floats, and
    texts such as "2024-05-01" points in time. Here a number is an int, a float if that keeps every digit, or else a
    Decimal.

    Raises:
        ValueError: If the file holds anything else.
    """
    text = path.read_text(encoding="utf-8-sig")
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_float=_number, parse_int=_whole_number)
    place = 0
    while (start := _NO_SPACE.search(text, place)) is not None:
        found, place = decoder.raw_decode(text, start.start())
        for row in found if isinstance(found, list) else [found]:
            if not isinstance(row, dict):
                raise ValueError(f"a row must be a JSON object, got {row!r:.80}")
            yield row


def _whole_number(text: str) -> int | Decimal:
    return int(text) if len(text) <= _LONGEST_INT else Decimal(text)


def _number(text: str) -> float | Decimal:
    exact, near = Decimal(text), float(text)
    return near if exact == Decimal(repr(near)) else exact


def _reason(error: Exception) -> str:
    """An error in one line: the readers of `datasets` raise many classes with long messages, whose cause is clearer."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    return (str(error.__cause__ or error).splitlines() or ["it is empty"])[0]


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
        records: The rows themselves: those of a JSON file as Python's values.
        features: The types of the file's columns by name, with nested columns in nested dictionaries. In a JSON file,
            every type is None.
        numbers: The place of each row in the file, counted from 0.
        split: `train` or `test`.
        origin: The path of the file, or the name on the hub.
    """

    records: Dataset | Sequence[Mapping[str, Any]]
    features: Mapping[str, Any]
    numbers: Sequence[int]
    split: str
    origin: str

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
        types = {name: _type(self.features, column) for name, column in columns.items()}
        records: Iterable[Any] = self.records
        for number, values in zip(self.numbers, records, strict=True):
            yield Row(values, columns, f"{self.split} row {number} (counted from 0) of {self.origin}", types)


def _all(records: Dataset | Sequence[Mapping[str, Any]], split: str, origin: str) -> Rows:
    features = records.features if isinstance(records, Dataset) else _names(records)
    return Rows(records, features, range(len(records)), split, origin)


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


def _type(features: Any, name: str) -> str:
    """The type of a column by its name; empty for one that holds no single values."""
    feature = _value_at(features, name)
    if isinstance(feature, ClassLabel):
        return _CLASS
    return str(feature.dtype) if isinstance(feature, Value) else ""


class UnfitColumn(TaskError):
    """An answer of a wrong type. Probably the whole column has it, so leaving out rows would not help."""


@dataclass(frozen=True)
class Row:
    """A row; every error of its methods names it and the column.

    Attributes:
        values: The values of the row by the data set's columns.
        columns: The data set's columns for the task's fields.
        place: The place of the row in words, for errors.
        types: The type of each field's column, such as `float64`; none for the rows of a JSON file, whose values are
            what is written there.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    place: str
    types: Mapping[str, str] = field(default_factory=dict)

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
        value, kind = self.value(name), self.types.get(name, "")
        if isinstance(value, list | Mapping):
            what = "a list" if isinstance(value, list) else "several fields"
            raise self.unfit(name, what, "name one that holds one answer, or write the answers as text")
        for types, what in _UNFIT.items():
            if isinstance(value, types):
                raise self.unfit(name, what)
        if kind == _CLASS and value is not None:
            raise self.unfit(name, "the number of a class")
        if isinstance(value, float) and math.isfinite(value):
            if abs(value) >= _SKIPS.get(kind, math.inf):
                raise self.unfit(name, f"a whole number in a column of {kind}, which rounds numbers of this size")
            text = str(np.dtype(kind or "float64").type(value))
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
