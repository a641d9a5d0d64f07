"""Runs as lines of JSON, one object a run: the file of a comparison that is not the study's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.files import write_atomically

#: A run: its method, settings and seed, its results, and where it was made.
Row = Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The runs of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes all runs of a file."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
