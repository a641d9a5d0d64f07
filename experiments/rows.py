"""Runs as lines of JSON, one object a run: the file of a comparison that is not the study's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.files import json_text, read_json, write_atomically
from troll_lab.cli import main as command
from troll_lab.lock import empty
from troll_lab.runs.build import LOCK
from troll_lab.terminal import UsageError

#: A run: its method, settings and seed, its results, and where it was made.
Row = Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The runs of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes all runs of a file."""
    write_atomically(path, "".join(json_text(row) + "\n" for row in rows))


def train_once(
    rows: list[Row], path: Path, run: Row, fields: Sequence[str], folder: Path, results: Callable[[Path], Row]
) -> None:
    """Trains unless `rows` has the run, and adds it there and to the file; ends the process if training fails.

    Args:
        rows: The file's runs, which may get one more.
        path: The file.
        run: What tells the run from others, such as its method and its seed.
        fields: The recipe and the fields of `troll train`.
        folder: Where the run is written.
        results: Reads what was measured from the folder.
    """
    if any(row.items() >= run.items() for row in rows):
        return
    if folder.exists():  # a run that was interrupted
        empty(folder, LOCK, holder="another troll train", error=UsageError)
    if code := command(["train", *fields, "--output_dir", str(folder)]):
        sys.exit(code)
    summary = read_json(folder / "summary.json")
    made = {"seconds": round(summary["seconds"], 1), "commit": summary["commit"]}
    rows.append({**run, **results(folder), **made, "versions": summary["versions"]})
    write_rows(path, rows)
