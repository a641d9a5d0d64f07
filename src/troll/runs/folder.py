"""The files of a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
