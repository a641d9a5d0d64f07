"""The files of a run on movements."""

from __future__ import annotations

from pathlib import Path

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
#: The paths of a few held-out episodes before and after training, and their targets.
PATHS = "paths.json"


def is_episodic(folder: Path) -> bool:
    """Whether a folder holds a run on movements."""
    return (folder / PATHS).is_file()
