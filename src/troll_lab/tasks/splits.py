"""The rows to train on and to evaluate on, from the Hugging Face hub or from local files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import Dataset, load_dataset

from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, TaskConfig, TaskError
from troll_lab.tasks.rows import Rows
from troll_lab.tasks.written import WrittenRows, too_large

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """A data set of the hub.

    Attributes:
        name: Its name on the hub, e.g. `openai/gsm8k`.
        config: Its configuration, if it has several.
        train: The split to train on; None for a benchmark.
        held_out: The split to evaluate on; without it, the last `eval_size` rows of `train` are held out.
        only: A column and the value that rows of the task have in it; ignored if there is no such column.
        held_out_file: A local file with the rows to evaluate on, if another file has those to train on.
    """

    name: str
    config: str | None = None
    train: str | None = "train"
    held_out: str = "test"
    only: tuple[str, str] | None = None
    held_out_file: Path | None = None


#: Divides the rows of one file, by index, into training and held-out ones; returns None to hold out the last ones.
Divide = Callable[[Dataset], tuple[Sequence[int], Sequence[int]] | None]


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
    if not path.is_dir():
        rows = _read(path, "train")
        if source.held_out_file is not None:
            return rows, _read(source.held_out_file, "test", field="eval_dataset")
        if source.train is None:
            return rows.select([]), replace(rows, split="test")
        parts = divide(rows.dataset) if divide is not None else None
        if parts is not None:
            return rows.select(parts[0]), rows.select(parts[1], "test")
        return _hold_out(_only(rows, source), config.eval_size)
    test = _read(_one_file(path, "test"), "test")
    evaluates = source.train is None or not _files(path, "train")
    return test.select([], "train") if evaluates else _read(_one_file(path, "train"), "train"), test


def _from_hub(config: TaskConfig, source: Source) -> tuple[Rows, Rows]:
    try:
        splits = load_dataset(source.name, source.config)
    except OSError as error:
        raise TaskError(
            f"cannot load {source.name} from the Hugging Face hub: connect to the network, or give a local copy with "
            f"--dataset_path (a file, or a folder with train.jsonl and test.jsonl); {_reason(error)}"
        ) from error
    except Exception as error:  # see _reason
        raise TaskError(
            f"cannot load {source.name} from the Hugging Face hub, configuration {source.config or 'default'}: "
            f"{_reason(error)}"
        ) from error
    first = source.held_out if source.train is None else source.train
    if first not in splits:
        raise TaskError(f"{source.name} has no split {first!r}, only {', '.join(splits)}")
    rows = _all(splits[first], "train", source.name)
    if source.train is None:
        return rows.select([]), replace(rows, split="test")
    if source.held_out in splits:
        return rows, _all(splits[source.held_out], "test", source.name)
    return _hold_out(_only(rows, source), config.eval_size)


def _all(dataset: Dataset, split: str, origin: str) -> Rows:
    return Rows(dataset, range(len(dataset)), split, origin)


def _only(rows: Rows, source: Source) -> Rows:
    if source.only is None or source.only[0] not in rows.dataset.column_names:
        return rows
    column, value = source.only
    return rows.select([index for index, found in enumerate(rows.dataset[column]) if found == value])


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
    return sorted(path for path in folder.iterdir() if path.suffix in _FORMATS and path.name.startswith(split))


def _read(path: Path, split: str, field: str = "dataset_path") -> Rows:
    if not path.is_file():
        raise TaskError(f"{field}: no such file or folder: {path}")
    if path.suffix not in _FORMATS:
        raise TaskError(f"{field}: {path} is not one of {', '.join(_FORMATS)}")
    try:
        dataset = load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    except Exception as error:  # see _reason
        reason = _reason(error)
        if "too big" in reason.lower() and _FORMATS[path.suffix] == "json":
            with contextlib.suppress(ValueError):  # of a file that is not JSON after all
                reason = f"{too_large(path)}: write it as text, in quotes"
        raise TaskError(f"cannot read {path}: {reason}") from error
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        raise TaskError(f"cannot read {path}: it has no rows")
    written = WrittenRows(path, len(dataset)) if _FORMATS[path.suffix] == "json" else None
    return replace(_all(dataset, split, str(path)), written=written)


def _reason(error: Exception) -> str:
    """An error in one line: the readers of `datasets` raise many classes with long messages; the cause is clearer."""
    return (str(error.__cause__ or error).splitlines() or ["it is empty"])[0]
