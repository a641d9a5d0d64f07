from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from troll.rewards.math import success
from troll.tasks.registry import Task, TaskConfig, TaskError, register_task

HUB_NAME = "openai/gsm8k"
INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@register_task("gsm8k")
def load(config: TaskConfig, argument: str = "") -> Task:
    r"""Loads GSM8K: grade-school word problems whose answer is a number.

    The hub's `openai/gsm8k` (`main`), or `config.dataset_path`: a folder with a train and a test file (`train.jsonl`,
    `test-00000-of-00001.parquet`, ...), or one file, whose last `eval_size` rows are then held out. Rows have the
    fields `question` and `answer`, where `answer` ends in `#### <number>`.
    A held-out question is dropped from training.

    Args:
        config: Path and sizes; all training rows and at most `eval_size` of the test rows by default.
        argument: Unused: the task takes none.

    Returns:
        The task. Its data sets have the columns `prompt` and `answer` (the number alone, without commas).

    Raises:
        TaskError: If the data cannot be reached or read, or a row lacks its question or its answer.
    """
    if find_spec("math_verify") is None:
        raise TaskError('this task needs math-verify: pip install "troll-rl[tasks]"')
    if config.options:
        raise TaskError(f"task 'gsm8k' takes no task_options, got {', '.join(config.options)}")
    train, test = _splits(config)
    train = train.select(range(min(config.train_size or len(train), len(train))))
    test = test.select(range(min(config.eval_size, len(test))))
    held_out = _to_prompts(test, "test")
    return Task(
        name=config.task,
        train_dataset=_to_prompts(train, "train", exclude=set(held_out["prompt"])),
        eval_dataset=held_out,
        reward_funcs=[success],
    )


def gold_answer(solution: str) -> str:
    """Returns the number after the last `####` of a GSM8K solution, without thousands separators.

    Raises:
        ValueError: If there is no `####`, or no number after it.
    """
    _, marker, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker:
        raise ValueError("no '#### <number>'")
    float(answer)
    return answer


def _splits(config: TaskConfig) -> tuple[Dataset, Dataset]:
    if config.dataset_path is None:
        return _from_hub()
    path = Path(config.dataset_path).expanduser()
    if path.is_dir():
        return _read(_one_file(path, "train")), _read(_one_file(path, "test"))
    rows = _read(path)
    if len(rows) <= config.eval_size:
        raise TaskError(f"{path} has {len(rows)} rows, not enough to hold out eval_size={config.eval_size} of them")
    held_out = len(rows) - config.eval_size
    return rows.select(range(held_out)), rows.select(range(held_out, len(rows)))


def _from_hub() -> tuple[Dataset, Dataset]:
    try:
        splits = load_dataset(HUB_NAME, "main")
    except OSError as error:
        raise TaskError(
            f"cannot load {HUB_NAME} from the Hugging Face hub: connect to the network, or give a local copy with "
            "--dataset_path (a folder with train.jsonl and test.jsonl)"
        ) from error
    return splits["train"], splits["test"]


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


def _to_prompts(rows: Dataset, split: str, exclude: Collection[str] = ()) -> Dataset:
    prompts, answers = [], []
    for number, row in enumerate(rows):
        prompt = f"{_text(row, 'question', split, number)}\n{INSTRUCTION}"
        if prompt in exclude:
            continue
        prompts.append(prompt)
        solution = _text(row, "answer", split, number)
        try:
            answers.append(gold_answer(solution))
        except ValueError as error:
            raise TaskError(
                f"{split} row {number} (counted from 0): field 'answer' must end in '#### <number>', "
                f"got {solution[-60:]!r}"
            ) from error
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def _text(row: Any, field: str, split: str, number: int) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{split} row {number} (counted from 0) has no text in its field {field!r}, got {value!r}")
    return value
