"""The files about a comparison: numbers, a table in Markdown, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from troll.files import json_text, write_atomically
from troll_lab.runs.comparison import read_comparison
from troll_lab.runs.comparison_tables import as_json, markdown


def write_comparison(paths: Sequence[Path], folder: Path) -> Path:
    """Writes `comparison.json`, `comparison.md` and `comparison.html` about several runs.

    The same files give the same bytes. Unfinished runs are named and do not count.

    Args:
        paths: Run folders, and folders of `troll compare`.
        folder: The folder to write to; made if it does not exist.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If a path holds no runs.
        ValueError: If a file is malformed, or two runs do not differ.
        ImportError: If the extra `report` is not installed; the other two files need only SciPy and are written.
    """
    comparison = read_comparison(paths)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "comparison.json", json_text(as_json(comparison), indent=2) + "\n")
    write_atomically(folder / "comparison.md", markdown(comparison))
    from troll_lab.reports.comparison_page import comparison_html

    page = folder / "comparison.html"
    write_atomically(page, comparison_html(comparison, folder))
    return page
