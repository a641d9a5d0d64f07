"""The folder of an evaluation: one command at a time, and one set of settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from troll.evaluation.config import EvaluationError
from troll.files import locked, read_json, write_atomically

#: The settings on which the generations depend; written before the first of them.
SETTINGS = "settings.json"
RESULTS = "results.json"
#: The lock that a command holds while it uses the folder.
LOCK = "eval.lock"

_ANOTHER = "choose another folder with --output_dir"


@contextlib.contextmanager
def claimed(folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, Any]) -> Iterator[None]:
    """Makes the folder of an evaluation, holds its lock, and records the settings.

    The tasks need not be those that the folder has: some may be new, and some left out.

    Args:
        folder: The folder: new, empty, or of an evaluation with the same settings.
        settings: The settings that all tasks share, as JSON.
        tasks: The settings of each task by name, as JSON.

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
        write_atomically(folder / SETTINGS, json.dumps(content, indent=2))
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
        raise EvaluationError(f"{error}: {_ANOTHER}") from error


def _check_same(folder: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any], prefix: str) -> None:
    for name in sorted({*recorded, *settings}):
        there, here = recorded.get(name), settings.get(name)
        if there != here:
            raise EvaluationError(
                f"{folder} holds an evaluation with other settings: {prefix}{name} is {json.dumps(there)} there and "
                f"{json.dumps(here)} here; use the same settings, or {_ANOTHER}"
            )
