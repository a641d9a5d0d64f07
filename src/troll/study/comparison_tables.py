"""A comparison as tables: on the terminal, in Markdown for a README, and as JSON for other programs."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from troll.study.comparison import Comparison, Group, Measure, Row, row_label
from troll.study.statistics import Estimate

_UNITS: dict[Measure, str] = {"success": "in per cent", "reward": "mean of the answers"}
_DIFFERENCE_UNITS: dict[Measure, str] = {"success": "in percentage points", "reward": "in units of the reward"}


def cell(group: Group | None) -> str:
    """What a group reached: the mean, the standard deviation over seeds, and their number, of how many planned ones."""
    estimate = group.final if group else None
    if group is None or estimate is None:
        return "–"
    spread = "" if estimate.spread is None else f" ± {figure(estimate.spread, group.measure)}"
    seeds = f"{estimate.size} of {group.planned}" if estimate.size < group.planned else f"{estimate.size}"
    return f"{figure(estimate.mean, group.measure)}{spread} ({seeds})"


def difference(estimate: Estimate, measure: Measure) -> str:
    """A difference with its interval."""
    ends = [figure(end, measure, sign="+") for end in estimate.interval or ()]
    interval = f" [{', '.join(ends)}]" if ends else ""
    return f"{figure(estimate.mean, measure, sign='+')}{interval} ({estimate.size})"


def figure(value: float, measure: Measure, sign: str = "") -> str:
    """A success in per cent, or a reward as it is; with "+" as the sign, positive ones have theirs."""
    shown = f"{100 * value:{sign}.1f}" if measure == "success" else f"{value:{sign}.3f}"
    return shown.replace("-", "−")


def cells(comparison: Comparison) -> list[tuple[Row, list[str]]]:
    """The table of what was reached: for each row the cell of every surrogate."""
    return [
        (row, [cell(comparison.group(row, surrogate)) for surrogate in comparison.surrogates])
        for row in comparison.rows
    ]


def console_table(comparison: Comparison) -> Table:
    """The table for a terminal."""
    measure = comparison.measure
    title = f"final held-out {measure}, {_UNITS[measure]}: mean ± standard deviation (seeds)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for surrogate in comparison.surrogates:
        table.add_column(surrogate, justify="right")
    for row, texts in cells(comparison):
        table.add_row(Text(row_label(row)), *texts)  # as text: a path in square brackets is no markup
    return table


def markdown(comparison: Comparison) -> str:
    """The same table, and the paired differences, in Markdown."""
    measure = comparison.measure
    head = ["", *comparison.surrogates]
    lines = [
        f"Final held-out {measure}, {_UNITS[measure]}: mean ± standard deviation over seeds (number of seeds).",
        "",
        _markdown_row(head),
        "|" + "---|" * len(head),
        *(_markdown_row([row_label(row), *texts]) for row, texts in cells(comparison)),
    ]
    if comparison.differences:
        lines += [
            "",
            f"Paired differences over common seeds, {_DIFFERENCE_UNITS[measure]}, with 95 % t intervals (number of "
            "seeds).",
            "",
            _markdown_row(["", "minus", "difference"]),
            "|---|---|---|",
            *(
                _markdown_row([found.first.label, found.second.label, difference(found.estimate, measure)])
                for found in comparison.differences
            ),
        ]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Every figure of the page, without rounding."""
    measure = comparison.measure
    return {
        "metric": f"final held-out {measure}",
        "commands": list(comparison.commands),
        "groups": [
            {
                "row": dict(group.row),
                "surrogate": group.surrogate,
                f"{measure}_by_seed": {str(seed): value for seed, value in group.finals.items()},
                measure: None if group.final is None else _estimate(group.final),
                "success_before": group.mean("success_before"),
                "reward_before": group.mean("reward_before"),
                "reward_after": group.mean("reward_after"),
                "entropy": group.mean("entropy_after"),
                "seconds": group.mean("seconds"),
                "training_seconds": group.mean("training_seconds"),
                "runs": [run.name for run in group.runs],
                "planned": group.planned,
            }
            for group in comparison.groups
        ],
        "differences": [
            {
                "first": {"row": dict(found.first.row), "surrogate": found.first.surrogate},
                "second": {"row": dict(found.second.row), "surrogate": found.second.surrogate},
                measure: _estimate(found.estimate),
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
