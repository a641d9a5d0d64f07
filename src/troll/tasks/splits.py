"""The rows of a task, from the Hugging Face hub or from local files."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from troll.tasks.registry import TaskConfig, TaskError

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_splits(config: TaskConfig, hub_name: str, hub_config: str | None = None) -> tuple[Dataset, Dataset]:
    """Reads training and held-out rows.

    From `config.dataset_path`: a folder with a train and a test file (`train.jsonl`, `test-00000-of-00001.parquet`,
    ...), or one file, whose last `eval_size` rows are then held out. Without it, from the hub.

    Args:
        config: Path and sizes. All training rows by default, and at most `eval_size` of the test rows.
        hub_name: The hub's data set; if it has no split `test`, the last `eval_size` rows of `train` are held out.
        hub_config: Its configuration, where it has several.

    Returns:
        The rows to train on, and those held out.

    Raises:
        TaskError: If the data cannot be reached or read, or there are too few rows.
    """
    train, test = _all_rows(config, hub_name, hub_config)
    train = train.select(range(min(config.train_size or len(train), len(train))))
    return train, test.select(range(min(config.eval_size, len(test))))


def text_of(row: Any, field: str, split: str, number: int) -> str:
    """Returns the text in a field of a row.

    Raises:
        TaskError: If there is none; names the row by its split and number.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{split} row {number} (counted from 0) has no text in its field {field!r}, got {value!r}")
    return value


def _all_rows(config: TaskConfig, hub_name: str, hub_config: str | None) -> tuple[Dataset, Dataset]:
    if config.dataset_path is None:
        return _from_hub(hub_name, hub_config, config.eval_size)
    path = Path(config.dataset_path).expanduser()
    if path.is_dir():
        return _read(_one_file(path, "train")), _read(_one_file(path, "test"))
    return _hold_out(_read(path), config.eval_size, str(path))


def _from_hub(name: str, configuration: str | None, eval_size: int) -> tuple[Dataset, Dataset]:
    try:
        splits = load_dataset(name, configuration)
    except (OSError, ValueError) as error:  # ValueError: it is not a data set, or has no such configuration
        raise TaskError(
            f"cannot load {name} from the Hugging Face hub: connect to the network, or give a local copy with "
            "--dataset_path (a folder with train.jsonl and test.jsonl)"
        ) from error
    if "train" not in splits:
        raise TaskError(f"{name} has no split 'train', only {', '.join(splits)}")
    return (splits["train"], splits["test"]) if "test" in splits else _hold_out(splits["train"], eval_size, name)


def _hold_out(rows: Dataset, eval_size: int, name: str) -> tuple[Dataset, Dataset]:
    if len(rows) <= eval_size:
        raise TaskError(f"{name} has {len(rows)} rows, not enough to hold out eval_size={eval_size} of them")
    held_out = len(rows) - eval_size
    return rows.select(range(held_out)), rows.select(range(held_out, len(rows)))


def _one_file(folder: Path, split: str) -> Path:
    files = sorted(path for path in folder.iterdir() if path.suffix in _FORMATS and path.name.startswith(split))
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise TaskError(f"{folder} must have one {split} file ({split}.jsonl, .json or .parquet), found {found}")
    return files[0]


def _read(path: Path) -> Dataset:
    if not path.is_file():
        raise TaskError(f"dataset_path: no such file or folder: {path}")
    if path.suffix not in _FORMATS:
        raise TaskError(f"dataset_path: {path} is not one of {', '.join(_FORMATS)}")
    try:
        dataset = load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        # The readers of datasets raise many classes; the reason is in the cause, and its message may be empty or long.
        reason = (str(error.__cause__ or error).splitlines() or ["it is empty"])[0]
        raise TaskError(f"cannot read {path}: {reason}") from error
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        raise TaskError(f"cannot read {path}: it has no rows")
    return dataset
