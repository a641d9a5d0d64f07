"""The folder of an evaluation: one command at a time, one set of settings, and a file of generations for each task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.files import json_text, json_value, read_json, write_atomically
from troll.grading import Verdict
from troll_lab.evaluation.config import EvaluationError
from troll_lab.lock import ANOTHER_FOLDER, locked

#: The settings on which the generations depend; written before the first of them.
SETTINGS = "settings.json"
RESULTS = "results.json"
#: The lock that a command holds while it uses the folder.
LOCK = "eval.lock"

Record = dict[str, Any]
#: The fields of every line of a task's generations.
FIELDS = ("problem", "sample", "prompt", "completion", "tokens", "finished", "answer", "score", "reason")


@contextlib.contextmanager
def claimed(folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, Any]) -> Iterator[None]:
    """Makes the folder of an evaluation, holds its lock, and records the settings.

    Args:
        folder: The folder: new, empty, or of an evaluation with the same settings.
        settings: The settings that all tasks share, as JSON.
        tasks: The settings of each task by name: some may be new to the folder, and some of the folder's missing.

    Raises:
        EvaluationError: If the folder cannot be used, holds something else or other settings, or is in use.
    """
    holder = "another troll eval"
    with locked(folder, LOCK, marker=SETTINGS, content="evaluation", holder=holder, error=EvaluationError):
        recorded = read_object(folder / SETTINGS)
        recorded_tasks = recorded.pop("tasks", {})
        if recorded:
            _check_same(folder, recorded, settings, "")
            for name in tasks.keys() & recorded_tasks.keys():
                _check_same(folder, recorded_tasks[name], tasks[name], f"{name}: ")
        content = {**settings, "tasks": {**recorded_tasks, **tasks}}
        write_atomically(folder / SETTINGS, json_text(content, indent=2))
        yield


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one for a missing file.

    Raises:
        EvaluationError: If the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except ValueError as error:
        raise EvaluationError(f"{error}: {ANOTHER_FOLDER}") from error


def _check_same(folder: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any], prefix: str) -> None:
    for name in sorted({*recorded, *settings}):
        there, here = recorded.get(name), json_value(settings.get(name))
        if there != here:
            raise EvaluationError(
                f"{folder} holds an evaluation with other settings: {prefix}{name} is {json_text(there)} there and "
                f"{json_text(here)} here; use the same settings, or {ANOTHER_FOLDER}"
            )


def read_records(path: Path, expected: Sequence[tuple[int, int]], batch_size: int) -> list[Record]:
    """Reads the records, and cuts the file after its last whole batch.

    So a resumed command generates the same batches as an uninterrupted one, bit for bit.

    Args:
        path: The file; it may be missing.
        expected: The problem and the sample of every line of a complete file, in its order.
        batch_size: The number of lines that are generated together.

    Returns:
        The records that are left.

    Raises:
        EvaluationError: If a line is not the record that belongs there. A last line that a crash cut short is dropped
            instead.
    """
    if not path.is_file():
        return []
    records: list[Record] = []
    ends = [0]
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        record = _parse(line)
        if record is None or number > len(expected) or (record["problem"], record["sample"]) != expected[number - 1]:
            raise EvaluationError(
                f"{path}, line {number}: not the record that belongs there; remove the file to generate it again, or "
                f"{ANOTHER_FOLDER}"
            )
        records.append(record)
        ends.append(ends[-1] + len(line))
    if len(records) < len(expected):
        records = records[: len(records) - len(records) % batch_size]
    with path.open("r+b") as file:
        file.truncate(ends[len(records)])
    return records


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Appends the records of a batch."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(records))


def replace_records(path: Path, records: Sequence[Record]) -> None:
    """Replaces the whole file; if interrupted, the old one remains."""
    write_atomically(path, _lines(records))


def _lines(records: Sequence[Record]) -> str:
    text = "".join(json_text(record, ensure_ascii=False) + "\n" for record in records)
    # UTF-8 cannot hold half of a surrogate pair; as a backslash and a number, it is JSON of the same string.
    return text.encode("utf-8", errors="backslashreplace").decode()


def verdict_of(record: Record) -> Verdict:
    """The verdict that a record holds."""
    return Verdict(record["score"], record["answer"], record["reason"])


def with_verdict(record: Record, verdict: Verdict) -> Record:
    """A completion's record with another verdict."""
    return record | {"answer": verdict.answer, "score": verdict.score, "reason": verdict.reason}


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and set(record) == set(FIELDS) else None
