"""The folder of an evaluation: one command at a time, and one set of settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from troll.evaluation.errors import EvaluationError
from troll.files import locked, write_atomically

#: What decides the generations; written before the first of them.
SETTINGS = "settings.json"
RESULTS = "results.json"
#: Held as long as a command is at work in the folder.
LOCK = "eval.lock"

_ANOTHER = "choose another folder with --output_dir"


@contextlib.contextmanager
def claimed(folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, Any]) -> Iterator[None]:
    """Makes the folder and holds its lock; it then has these settings.

    Tasks may be added to those that it has, and left out.

    Args:
        folder: New, empty, or of an evaluation with the same settings.
        settings: What all tasks share, as JSON.
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
    """Reads a JSON object; a missing file holds an empty one.

    Raises:
        EvaluationError: If the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise EvaluationError(f"{path} is not a JSON object: {_ANOTHER}")
    return content


def _check_same(folder: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any], prefix: str) -> None:
    for name in sorted({*recorded, *settings}):
        there, here = recorded.get(name), settings.get(name)
        if there != here:
            raise EvaluationError(
                f"{folder} holds an evaluation with other settings: {prefix}{name} is {json.dumps(there)} there and "
                f"{json.dumps(here)} here; go on with the same, or {_ANOTHER}"
            )
