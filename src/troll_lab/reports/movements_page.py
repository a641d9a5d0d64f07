"""The page about a run on movements: curves over environment steps, and paths to the targets, in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from troll.files import read_json, write_atomically
from troll_lab.episodic.config import CONFIG, METRICS, PATHS, SUMMARY
from troll_lab.reports.curves import Chart, curve_card
from troll_lab.reports.figures import COLOURS, LIGHT, inline_figure
from troll_lab.reports.page import Card, render
from troll_lab.runs.recorded import Rows, metric, read_metrics

_CHARTS = (
    Chart(
        "Success",
        "share of episodes",
        "percent",
        {"success": "sampled movements", "eval_success": "mean movements, held out"},
        "How many episodes end with the task done. Held-out episodes are always the same; bars are 95 % intervals.",
    ),
    Chart(
        "Return",
        "mean per episode",
        "linear",
        {"return": "sampled movements", "eval_return": "mean movements, held out"},
        "What training maximises.",
    ),
    Chart(
        "KL to the policy before",
        "nats, log scale",
        "log",
        {"mean_kl": "means", "covariance_kl": "covariances"},
        "How far a rollout's updates moved the policy that acts next. A shared covariance is written back and keeps "
        "its bound; means follow the projection by the pull only.",
    ),
    Chart(
        "Projected fraction",
        "share of means",
        "percent",
        {"projected_fraction": "projected"},
        "How many means were outside their bound, over the updates of a rollout.",
    ),
    Chart(
        "Entropy",
        "nats",
        "linear",
        {"entropy": "entropy"},
        "Of the movements' weights. A slow fall is learning; a fast one ends exploration.",
    ),
    Chart(
        "Explained variance",
        "of the critic's targets",
        "linear",
        {"explained_variance": "explained variance"},
        "The share of the variance of its targets that the critic predicted; a constant prediction has 0.",
    ),
)


def write_report(folder: Path) -> Path:
    """Writes `report.html` of a run, finished or not, from the files of its folder.

    Args:
        folder: The folder that `troll_lab.episodic.train.train` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If a file of the folder is missing.
    """
    paths = read_json(folder / PATHS)
    page = render(
        "movements.html",
        run=read_json(folder / SUMMARY),
        curves=_curves(read_metrics(folder / METRICS)),
        paths=[_paths(when, paths[when], paths["target"]) for when in ("before", "after")],
        configuration=(folder / CONFIG).read_text(encoding="utf-8"),
    )
    report = folder / "report.html"
    write_atomically(report, page)
    return report


def _curves(rows: Rows) -> list[Card]:
    by_steps = [{**row, "step": row["environment_steps"]} for row in rows]
    intervals = {
        key: {row["step"]: row[f"{key}_interval"] for row in by_steps if row.get(f"{key}_interval") is not None}
        for key in ("eval_success", "eval_return")
    }
    last = max(1, by_steps[-1]["step"])
    logged = [(chart, {key: metric(by_steps, key) for key in chart.lines}) for chart in _CHARTS]
    return [
        curve_card(chart, data, last, intervals, steps="environment steps")
        for chart, data in logged
        if any(map(len, data.values()))
    ]


def _paths(when: str, paths: Sequence[Sequence[Sequence[float]]], targets: Sequence[Sequence[float]]) -> Card:
    """The paths of a few held-out episodes in the plane, each with its target in the same colour."""

    def paint(axes: Axes) -> None:
        for number, (path, target) in enumerate(zip(paths, targets, strict=True)):
            colour = LIGHT[COLOURS[number % len(COLOURS)]]
            axes.plot(*zip(*path, strict=True), color=colour, linewidth=1)
            axes.plot(*path[-1], "o", color=colour, markersize=3)
            axes.plot(*target, "x", color=colour, markersize=6)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel("metres")

    caption = "Each line is the path of one episode and ends at the dot; the cross in the same colour is its target."
    slug, title = f"ways-{when}", f"{when.capitalize()} training"
    return Card(slug, title, inline_figure(slug, title, paint, height=4.0), caption=caption)
