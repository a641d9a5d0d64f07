"""Files of settings and of a run's folder, read with errors that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from troll.terminal import one_line

_DICTIONARIES = ("surrogate_kwargs", "critic_kwargs")


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


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a file of settings: a recipe, a task, or a run's `config.yaml`.

    Raises:
        ValueError: If the file does not hold "field: value" lines.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({one_line(error)})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected 'field: value' lines")
    return settings


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, with those of its surrogate and its critic as `surrogate_kwargs.NAME` and so on."""
    inner = {f"{name}.{key}": value for name in _DICTIONARIES for key, value in (settings.get(name) or {}).items()}
    return {name: value for name, value in settings.items() if name not in _DICTIONARIES} | inner


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Whether training reached its end, according to `summary.json`."""
    return summary.get("status") == "finished"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl`: objects with an integer `step`.

    Raises:
        ValueError: If a line is not one. A last line that a crash cut short is left out instead.
    """
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if line_number == len(lines) and not line.endswith(b"\n"):
                break  # the run was killed while it wrote this line
            raise ValueError(f"{path}, line {line_number}: not JSON ({error})") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f'{path}, line {line_number}: expected an object with an integer "step"')
        rows.append(row)
    return rows
