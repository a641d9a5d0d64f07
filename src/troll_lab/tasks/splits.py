"""What is trained on, and what is held out: of the rows of files and the hub, and of generated questions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from datasets import load_dataset

from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, TaskConfig, TaskError
from troll_lab.tasks.rows import Column, Records, Rows
from troll_lab.values import unique_keys

#: The endings of local files with rows.
SUFFIXES = (".json", ".jsonl", ".parquet")
_NO_SPACE = re.compile(r"\S")

#: The number of digits up to which every Python converts a text to an int.
_LONGEST_INT = 640

#: The splits of generated questions, which are as many as anyone asks for.
Split = Literal["eval", "warmup", "train"]


def sixteenth(text: str) -> int:
    """The sixteenth of all texts, from 0, to which a text belongs, by its SHA-256.

    A task whose splits are different sixteenths of its questions never holds out a question that it trains on, for any
    sizes.
    """
    return hashlib.sha256(text.encode()).digest()[0] % 16


@dataclass(frozen=True)
class Source:
    """A data set: where its rows are, unless `dataset_path` names other data, and what a task takes of them.

    Attributes:
        name: Its name on the hub, e.g. `openai/gsm8k`.
        columns: The columns that a task reads, by the task's names for them.
        config: Its configuration on the hub, if it has several.
        train: The split to train on; None for a benchmark.
        held_out: The split to evaluate on; without it, the last `eval_size` rows of `train` are held out.
        needs_held_out: Whether a data set on the hub without that split is an error.
        only: A column and the value that rows of the task have in it; ignored where that column is missing.
        path: A local file or folder instead of the hub.
        held_out_path: A local file with the rows to evaluate on, instead of those that `path` has.
        divide: A function that divides the rows of one file as the data set's authors did. It returns the indices of
            training and of held-out rows, or None for a file that they did not divide.
    """

    name: str
    columns: Mapping[str, Column]
    config: str | None = None
    train: str | None = "train"
    held_out: str = "test"
    needs_held_out: bool = False
    only: tuple[str, str] | None = None
    path: Path | None = None
    held_out_path: Path | None = None
    divide: Callable[[Rows], tuple[Sequence[int], Sequence[int]] | None] = lambda rows: None


def read_splits(config: TaskConfig, source: Source) -> tuple[Rows, Rows]:
    """Reads training and held-out rows.

    They come from `config.dataset_path` or `source.path`: a folder with a train and a test file (`train.jsonl`,
    `test-00000-of-00001.parquet`, ...), or one file, whose last `eval_size` rows are then held out. Without a path,
    they come from the hub. For a benchmark, all rows of one file are held out. A folder without a train file has only
    rows to evaluate on.

    Args:
        config: The path, and the number of rows of one file to hold out. With an `eval_size` of None, these are as many
            as a run holds out by default, so that an evaluation on all rows does not include training rows.
        source: The data set.

    Returns:
        The rows to train on, and the held-out rows, which may be more than `eval_size`.

    Raises:
        TaskError: If the data cannot be reached or read, or there are too few rows.
    """
    if config.dataset_path:
        rows, held_out = _local(Path(config.dataset_path).expanduser(), source)
    elif source.path is not None:
        rows, held_out = _local(source.path, source, source.held_out_path)
    else:
        rows, held_out = _from_hub(source)
    if held_out is not None:
        return rows, held_out
    if source.train is None:
        return rows.select([]), replace(rows, split="test")
    train, test = source.divide(rows) or _without_the_last(rows, config.eval_size)
    return rows.select(train), rows.select(test, "test")


def _local(path: Path, source: Source, held_out_path: Path | None = None) -> tuple[Rows, Rows | None]:
    """The training and the held-out rows of a folder or of two files; all rows of one file, and None."""
    held_out = None if held_out_path is None else _read_file(held_out_path, "test", source, field="eval_dataset")
    if not path.is_dir():
        return _read_file(path, "train", source), held_out
    if held_out is None:
        held_out = _read_file(_one_file(path, "test"), "test", source)
    if source.train is None or not _files(path, "train"):
        return held_out.select([], "train"), held_out
    return _read_file(_one_file(path, "train"), "train", source), held_out


def _from_hub(source: Source) -> tuple[Rows, Rows | None]:
    """The training and the held-out rows of the hub; all rows, and None, of a benchmark or without a held-out split."""
    try:
        splits = load_dataset(source.name, source.config)
    except Exception as error:  # the readers of `datasets` raise many classes
        if isinstance(error, OSError):
            remedy = "or give a local copy with --dataset_path (a file, or a folder with train.jsonl and test.jsonl)"
            why = f": connect to the network, {remedy}; {_reason(error)}"
        else:
            why = f", configuration {source.config or 'default'}: {_reason(error)}"
        raise TaskError(f"cannot load {source.name} from the Hugging Face hub{why}") from error
    first = source.held_out if source.train is None else source.train
    for split in (first, source.held_out) if source.needs_held_out else (first,):
        if split not in splits:
            raise TaskError(f"{source.name} has no split {split!r}, only {', '.join(splits)}")
    rows = _rows(splits[first], "train", source.name, source)
    if source.train is None or source.held_out not in splits:
        return rows, None
    return rows, _rows(splits[source.held_out], "test", source.name, source)


def _without_the_last(rows: Rows, eval_size: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """The indices of the rows without the last `eval_size`, and those of the last."""
    size = DEFAULT_EVAL_SIZE if eval_size is None else eval_size
    if len(rows) <= size:
        raise TaskError(
            f"{rows.origin} has {len(rows)} rows, not enough to hold out eval_size={size} of them: choose a smaller "
            "eval_size, that of the training run if there was one"
        )
    return range(len(rows) - size), range(len(rows) - size, len(rows))


def _one_file(folder: Path, split: str) -> Path:
    files = _files(folder, split)
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise TaskError(f"{folder} must have one {split} file ({split}.jsonl, .json or .parquet), found {found}")
    return files[0]


def _files(folder: Path, split: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name.startswith(split))


def _read_file(path: Path, split: str, source: Source, field: str = "dataset_path") -> Rows:
    if not path.is_file():
        raise TaskError(f"{field}: no such file or folder: {path}")
    if path.suffix not in SUFFIXES:
        raise TaskError(f"{field}: {path} is not one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            records = load_dataset("parquet", data_files=str(path), split="train")
        else:
            records = list(_json_objects(path))
    except Exception as error:  # the readers of `datasets` raise many classes
        raise TaskError(f"cannot read {path}: {_reason(error)}") from error
    if not len(records):
        raise TaskError(f"cannot read {path}: it has no rows")
    return _rows(records, split, str(path), source)


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
    """An error in one line: the messages of `datasets` are long, and their cause is clearer."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    return (str(error.__cause__ or error).splitlines() or ["it is empty"])[0]


def _rows(records: Records, split: str, origin: str, source: Source) -> Rows:
    """The rows of a file or a split of the hub that the source's task takes."""
    rows = Rows.of(records, split, origin)
    if source.only is None or source.only[0] not in rows.features:
        return rows
    column, value = source.only
    return rows.select([index for index, found in enumerate(rows.values(column)) if found == value])
