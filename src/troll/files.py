"""Reading and writing JSON, and writing files atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
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
    """A value as strict JSON, which every reader accepts: with `json_value` for numbers that JSON lacks.

    Args:
        value: Any value that `json.dumps` takes.
        **options: Those of `json.dumps`, such as `indent`.
    """
    return json.dumps(json_value(value), allow_nan=False, **options)


def json_value(value: Any) -> Any:
    """A value with the texts `Infinity`, `-Infinity` and `NaN` in place of these numbers.

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
