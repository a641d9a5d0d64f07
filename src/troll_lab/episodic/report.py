"""The page about a run on movements: curves over environment steps, and paths to the targets, in one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troll.files import read_json, write_atomically
from troll_lab.runs.page_frame import duration, figure_card, percent, render
from troll_lab.runs.plot import COLOURS, LIGHT, Scale, drawing, set_scale
from troll_lab.runs.recorded import Rows, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The files of a run's folder.
CONFIG, METRICS, SUMMARY, PATHS = "config.yaml", "metrics.jsonl", "summary.json", "paths.json"


@dataclass(frozen=True)
class _Card:
    """A card of the page; held-out metrics, which start with `eval_`, are drawn with their intervals."""

    title: str
    unit: str
    scale: Scale
    lines: Mapping[str, str]
    caption: str


_CARDS = (
    _Card(
        "Success",
        "share of episodes",
        "percent",
        {"success": "sampled movements", "eval_success": "mean movements, held out"},
        "How many episodes end with the task done. Held-out episodes are always the same; bars are 95 % intervals.",
    ),
    _Card(
        "Return",
        "mean per episode",
        "linear",
        {"return": "sampled movements", "eval_return": "mean movements, held out"},
        "What training maximises.",
    ),
    _Card(
        "KL to the policy before",
        "nats, log scale",
        "log",
        {"mean_kl": "means", "covariance_kl": "covariances"},
        "How far a rollout's updates moved the policy that acts next. A shared covariance is written back and keeps "
        "its bound; means follow the projection by the pull only.",
    ),
    _Card(
        "Projected fraction",
        "share of means",
        "percent",
        {"projected_fraction": "projected"},
        "How many means were outside their bound, over the updates of a rollout.",
    ),
    _Card(
        "Entropy",
        "nats",
        "linear",
        {"entropy": "entropy"},
        "Of the movements' weights. A slow fall is learning; a fast one ends exploration.",
    ),
    _Card(
        "Explained variance",
        "of the critic's targets",
        "linear",
        {"explained_variance": "explained variance"},
        "The share of the variance of its targets that the critic predicted; a constant prediction has 0.",
    ),
)


def is_episodic(folder: Path) -> bool:
    """Whether a folder holds a run on movements."""
    return (folder / PATHS).is_file()


def write_report(folder: Path) -> Path:
    """Writes `report.html` of a run, finished or not, from the files of its folder.

    Args:
        folder: The folder that `troll_lab.episodic.train.train` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If a file of the folder is missing.
        ImportError: If matplotlib is not installed.
    """
    summary, rows, paths = (
        read_json(folder / SUMMARY),
        read_metrics(folder / METRICS),
        read_json(folder / PATHS),
    )
    drawn = [_curve(card, rows) for card in _CARDS if any(name in row for name in card.lines for row in rows)]
    settings = escape((folder / CONFIG).read_text(encoding="utf-8"))
    body = [
        '<div class="cards">',
        *drawn,
        "</div>",
        "<h2>Paths to the targets</h2>",
        '<div class="cards">',
        *(_ways(when, paths[when], paths["target"]) for when in ("before", "after")),
        "</div>",
        f"<details><summary>Configuration</summary><pre>{settings}</pre></details>",
    ]
    page = render(
        title=f"TROLL: {summary['environment']}",
        heading=f"TROLL · {escape(summary['environment'])} · {escape(summary['method'])}",
        headline=_headline(summary),
        body="\n".join(body),
        footer=f"{summary['iterations']} iterations, {summary['environment_steps']} environment steps.",
    )
    report = folder / "report.html"
    write_atomically(report, page)
    return report


def _headline(summary: Mapping[str, Any]) -> str:
    low, high = summary["success_interval"]
    status = "" if summary["status"] == "finished" else f'<span class="interrupted">{summary["status"]}</span>'
    return (
        '<p class="headline"><span class="label">Held-out success</span> '
        f"{percent(summary['success_before'])} → <b>{percent(summary['success_after'])}</b>{status}</p>"
        f'<p class="outcome">in {summary["environment_steps"]} environment steps, {duration(summary["seconds"])}</p>'
        f'<p class="note">95 % interval from {summary["eval_size"]} episodes: {100 * low:.1f}–{percent(high)}. '
        f"Return {summary['return_before']:.1f} → {summary['return_after']:.1f}.</p>"
    )


def _curve(card: _Card, rows: Rows) -> str:
    def points(key: str) -> tuple[list[float], list[Any]]:
        have = [(row["environment_steps"], row[key]) for row in rows if key in row]
        return [step for step, _ in have], [value for _, value in have]

    last = max(1, rows[-1]["environment_steps"])

    def paint(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        for colour, key in zip(COLOURS, card.lines, strict=False):
            steps, values = points(key)
            if key.startswith("eval_"):
                _, intervals = points(f"{key}_interval")
                ends = [[max(0.0, v - low) for v, (low, _) in zip(values, intervals, strict=True)]]
                ends.append([max(0.0, high - v) for v, (_, high) in zip(values, intervals, strict=True)])
                axes.errorbar(steps, values, ends, fmt="o", markersize=3, elinewidth=1, color=LIGHT[colour], zorder=3)
            else:
                axes.plot(steps, values, color=LIGHT[colour], linewidth=1)
        axes.set_xlim(0, last * 1.02)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if last >= 1e6 else f"{value / 1e3:g} k")
        set_scale(axes, card.scale, [value for key in card.lines for value in points(key)[1]])

    slug = card.title.lower().replace(" ", "-")
    legend = {label: colour for colour, label in zip(COLOURS, card.lines.values(), strict=False)}
    return figure_card(
        slug,
        f'{card.title} <span class="unit">{card.unit}</span>',
        drawing(slug, card.title, paint),
        legend if len(legend) > 1 else None,
        card.caption,
    )


def _ways(when: str, paths: Sequence[Sequence[Sequence[float]]], targets: Sequence[Sequence[float]]) -> str:
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
    title = f"{when.capitalize()} training"
    return figure_card(f"ways-{when}", title, drawing(f"ways-{when}", title, paint, height=4.0), None, caption)
