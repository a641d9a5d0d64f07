"""Reading and writing JSON, writing files atomically, and locking folders."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Fields of a run's settings that hold a dictionary of settings.
_DICTIONARIES = ("surrogate_kwargs", "critic_kwargs")


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves either the old or the new content."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: If the file does not hold one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def json_text(value: Any, **options: Any) -> str:
    """A value as strict JSON, which every reader takes: with `json_value` for numbers that JSON lacks.

    Args:
        value: What `json.dumps` takes.
        **options: Those of `json.dumps`, such as `indent`.
    """
    return json.dumps(json_value(value), allow_nan=False, **options)


def json_value(value: Any) -> Any:
    """A value with the texts `Infinity`, `-Infinity` and `NaN` for the numbers of these names.

    Nothing is lost: `float` reads these texts, and so does pandas where a column of JSON lines has them.
    """
    if isinstance(value, Mapping):
        return {name: json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, with those of its surrogate and its critic as `surrogate_kwargs.NAME` and so on."""
    inner = {f"{name}.{key}": value for name in _DICTIONARIES for key, value in (settings.get(name) or {}).items()}
    return {name: value for name, value in settings.items() if name not in _DICTIONARIES} | inner


@contextlib.contextmanager
def locked(
    folder: Path, lock: str, *, holder: str, error: type[Exception], marker: str | None = None, content: str = ""
) -> Iterator[int]:
    """Makes a folder and holds its lock, a file; child processes may inherit its descriptor to keep it locked.

    Args:
        folder: The folder: new, empty, or with the marker.
        lock: The name of the lock file in the folder.
        holder: The other program that may hold the lock, in words, for errors.
        error: The exception to raise if the folder cannot be used, holds something else or is in use.
        marker: The file that shows of which kind the folder is; None if it may hold anything.
        content: The content of a folder with the marker, in words, for errors.

    Yields:
        The descriptor of the lock file.
    """
    try:
        import fcntl  # not on Windows, where all but commands works
    except ImportError as cause:
        raise error(f"output_dir {folder} cannot be locked here: that takes Linux or macOS ({cause})") from cause
    choose = "choose another folder with --output_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if marker and not (folder / marker).is_file() and any(path.name != lock for path in folder.iterdir()):
            raise error(f"output_dir {folder} is not empty and holds no {content}: {choose}")
        file = (folder / lock).open("a")
    except OSError as cause:
        raise error(f"output_dir {folder} cannot be used: {cause.strerror}") from cause
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise error(f"{holder} is at work in {folder}: wait for it, or {choose}") from cause
        except OSError as cause:  # some network file systems have no locks
            raise error(f"output_dir {folder} cannot be locked: {cause.strerror}; {choose}") from cause
        yield file.fileno()
