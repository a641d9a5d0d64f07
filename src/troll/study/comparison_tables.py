"""A comparison as tables: on the terminal, in Markdown for a README, and as JSON for other programs."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from troll.study.comparison import Comparison, Row, row_label
from troll.study.statistics import Estimate


def cell(estimate: Estimate | None) -> str:
    """A success in per cent: the mean, the standard deviation over seeds, and their number."""
    if estimate is None:
        return "–"
    spread = "" if estimate.spread is None else f" ± {100 * estimate.spread:.1f}"
    return f"{100 * estimate.mean:.1f}{spread} ({estimate.size})"


def points(estimate: Estimate) -> str:
    """A difference of successes in percentage points, with its interval."""
    interval = "" if estimate.interval is None else f" [{', '.join(map(_signed, estimate.interval))}]"
    return f"{_signed(estimate.mean)}{interval} ({estimate.size})"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def success_cells(comparison: Comparison) -> list[tuple[Row, list[str]]]:
    """The table of final held-out success: for each row the cell of every surrogate."""
    return [
        (row, [cell(group.success if group else None) for group in groups])
        for row in comparison.rows
        for groups in [[comparison.group(row, surrogate) for surrogate in comparison.surrogates]]
    ]


def console_table(comparison: Comparison) -> Table:
    """The table for a terminal."""
    table = Table(title="final held-out success, %: mean ± standard deviation (seeds)", title_justify="left")
    table.add_column("")
    for surrogate in comparison.surrogates:
        table.add_column(surrogate, justify="right")
    for row, cells in success_cells(comparison):
        table.add_row(row_label(row), *cells)
    return table


def markdown(comparison: Comparison) -> str:
    """The same table, and the paired differences, in Markdown."""
    head = ["", *comparison.surrogates]
    lines = [
        "Final held-out success in per cent: mean ± standard deviation over seeds (number of seeds).",
        "",
        _markdown_row(head),
        "|" + "---|" * len(head),
        *(_markdown_row([row_label(row), *cells]) for row, cells in success_cells(comparison)),
    ]
    if comparison.differences:
        lines += [
            "",
            "Paired differences over common seeds, in percentage points, with 95 % t intervals (number of seeds).",
            "",
            _markdown_row(["", "minus", "difference"]),
            "|---|---|---|",
            *(
                _markdown_row([found.first.label, found.second.label, points(found.estimate)])
                for found in comparison.differences
            ),
        ]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Every figure of the page, without rounding."""
    return {
        "metric": "final held-out success",
        "groups": [
            {
                "row": dict(group.row),
                "surrogate": group.surrogate,
                "success_by_seed": {str(seed): value for seed, value in group.successes.items()},
                "success": None if group.success is None else _estimate(group.success),
                "entropy": group.mean("entropy_after"),
                "seconds": group.mean("seconds"),
                "training_seconds": group.mean("training_seconds"),
                "runs": [run.name for run in group.runs],
            }
            for group in comparison.groups
        ],
        "differences": [
            {
                "first": {"row": dict(found.first.row), "surrogate": found.first.surrogate},
                "second": {"row": dict(found.second.row), "surrogate": found.second.surrogate},
                "success": _estimate(found.estimate),
            }
            for found in comparison.differences
        ],
        "unfinished": [run.name for run in comparison.runs if not run.finished],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "mean": estimate.mean,
        "standard_deviation": estimate.spread,
        "seeds": estimate.size,
        "interval": estimate.interval,
        "interval_method": estimate.method,
    }
