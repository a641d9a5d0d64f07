"""A comparison as tables: on the terminal, in Markdown for a README, and as JSON for other programs."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from troll_lab.evaluation.estimators import Interval
from troll_lab.runs.comparison import Comparison, Group, Method, row_label
from troll_lab.runs.recorded import Measure
from troll_lab.runs.statistics import SeedMean
from troll_lab.runs.text import markdown_table

#: The units of results and of differences, after a number; and in words.
UNITS: dict[Measure, str] = {"success": " %", "reward": ""}
DIFFERENCE_UNITS: dict[Measure, str] = {"success": " points", "reward": ""}
_IN_UNITS: dict[Measure, str] = {"success": "in per cent", "reward": "mean of the answers"}
_IN_DIFFERENCE_UNITS: dict[Measure, str] = {"success": "in percentage points", "reward": "in units of the reward"}

ROUNDING = 1e-12  # equal differences differ by this much


def cell(group: Group | None) -> str:
    """The result of a group: the mean, the standard deviation over seeds, their number, and the number planned."""
    estimate = group.final if group else None
    if group is None or estimate is None:
        return "–"
    seeds = f"{estimate.size} of {group.planned}" if estimate.size < group.planned else f"{estimate.size}"
    return estimate_text(estimate, group.measure, seeds)


def estimate_text(estimate: SeedMean, measure: Measure, seeds: str = "") -> str:
    """A mean, the standard deviation over seeds, and their number, or `seeds` in its place."""
    spread = "" if estimate.spread is None else f" ± {formatted(estimate.spread, measure)}"
    return f"{formatted(estimate.mean, measure)}{spread} ({seeds or estimate.size})"


def difference(estimate: SeedMean, measure: Measure) -> str:
    """A difference with its interval, or the reason why it has none, and the number of seeds."""
    shown = f"{plain_difference(estimate, measure)} ({estimate.size})"
    if not is_constant(estimate):
        return shown
    return f"{shown}, no seed differs" if abs(estimate.mean) < ROUNDING else f"{shown}, the same for every seed"


def plain_difference(estimate: SeedMean, measure: Measure) -> str:
    """A difference with its interval."""
    mean = 0.0 if abs(estimate.mean) < ROUNDING else estimate.mean
    ends = [formatted(end, measure, sign="+") for end in interval_of(estimate) or ()]
    interval = f" [{', '.join(ends)}]" if ends else ""
    return f"{formatted(mean, measure, sign='+' if mean else '')}{interval}"


def is_constant(estimate: SeedMean) -> bool:
    """Whether several seeds have the same value, which leaves no interval."""
    return estimate.spread is not None and estimate.spread < ROUNDING


def interval_of(estimate: SeedMean) -> Interval | None:
    """The interval of an estimate; None if nothing is known about it."""
    return None if is_constant(estimate) else estimate.interval


def result_interval(estimate: SeedMean, measure: Measure) -> Interval | None:
    """The interval of a result; for a success, cut off at 0 % and 100 %, which Student's t can exceed."""
    interval = interval_of(estimate)
    if interval is None or measure == "reward":
        return interval
    return max(0.0, interval[0]), min(1.0, interval[1])


def formatted(value: float, measure: Measure, sign: str = "") -> str:
    """A success in per cent, or a reward unchanged; with "+" as the sign, positive ones show it."""
    shown = f"{100 * value:{sign}.1f}" if measure == "success" else f"{value:{sign}.3f}"
    return shown.replace("-", "−")


def _rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The table of results: for each row, its name, and the cell of every surrogate."""
    return [
        (row_label(row), [cell(groups.get(surrogate)) for surrogate in comparison.surrogates])
        for row, groups in comparison.table.items()
    ]


def console_table(comparison: Comparison) -> Table:
    """The table for a terminal."""
    measure = comparison.measure
    title = f"final held-out {measure}, {_IN_UNITS[measure]}: mean ± standard deviation (seeds)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for surrogate in comparison.surrogates:
        table.add_column(surrogate, justify="right")
    for name, texts in _rows(comparison):
        table.add_row(Text(name), *texts)  # as text, since a path in square brackets is not markup
    return table


def markdown(comparison: Comparison) -> str:
    """The same table, and the paired differences, in Markdown."""
    measure = comparison.measure
    parts = [
        f"Final held-out {measure}, {_IN_UNITS[measure]}: mean ± standard deviation over seeds (number of seeds).",
        markdown_table(["", *comparison.surrogates], [[name, *texts] for name, texts in _rows(comparison)]),
    ]
    if comparison.differences:
        differences = [
            [found.first.label, found.second.label, difference(found.estimate, measure)]
            for found in comparison.differences
        ]
        parts += [
            f"Paired differences over common seeds, {_IN_DIFFERENCE_UNITS[measure]}, with 95 % t intervals (number of "
            "seeds).",
            markdown_table(["", "minus", "difference"], differences),
        ]
    return "\n\n".join(parts) + "\n"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Every figure of the page, without rounding."""
    measure = comparison.measure
    return {
        "metric": f"final held-out {measure}",
        "commands": list(comparison.commands),
        "groups": [
            {
                **method_json(group),
                f"{measure}_by_seed": {str(seed): value for seed, value in group.finals.items()},
                measure: None if group.final is None else estimate_json(group.final),
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
                "first": method_json(found.first),
                "second": method_json(found.second),
                measure: estimate_json(found.estimate),
            }
            for found in comparison.differences
        ],
        "unfinished": [run.name for run in comparison.runs if not run.finished],
    }


def left_out(comparison: Comparison) -> list[str]:
    """A sentence about each run that is not finished."""
    return [f"{run.name} is left out: it is {run.status}." for run in comparison.runs if not run.finished]


def method_json(method: Method) -> dict[str, Any]:
    """The fields that identify a method."""
    return {"row": dict(method.row), "surrogate": method.surrogate}


def estimate_json(estimate: SeedMean) -> dict[str, Any]:
    """An estimate without rounding."""
    return {
        "mean": estimate.mean,
        "standard_deviation": estimate.spread,
        "seeds": estimate.size,
        "interval": interval_of(estimate),
        "interval_method": None if is_constant(estimate) else estimate.method,
    }
