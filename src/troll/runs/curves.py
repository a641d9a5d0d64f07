"""The curves of one run as cards of HTML with inline SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from troll.runs.charts import (
    BOUND,
    CHARTS,
    CONDITIONING,
    GRADIENT_NORM,
    HELD_OUT,
    TRUST,
    Chart,
    diagnostic_charts,
    evaluation_charts,
)
from troll.runs.page_frame import figure_card
from troll.runs.plot import COLOURS, LIGHT, Points, columns, drawing, running_mean, set_scale, thin, window
from troll.runs.recorded import Rows, eval_size, held_out_success, metric_points, number
from troll.runs.statistics import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 400  # more points do not make a line more readable, and the page would exceed a megabyte


def curves_html(rows: Rows, summary: Mapping[str, Any]) -> str:
    """The cards of all curves with data, and a sentence for each chart that should have data and has none.

    There must be at least one row. Of the summary, `surrogate`, `kl_bound`, `eval_size`, `steps` and the successes are
    read.
    """
    bound = metric_points(rows, BOUND)
    fixed = number(summary.get("kl_bound"), (1e-300, math.inf))
    last = max(1, int(number(summary.get("steps")) or 0), *(row["step"] for row in rows))
    if not _changes(bound):
        bound = [] if fixed is None else [(0, fixed)]
    # A run without a trust region does not lack what it cannot log.
    without_region = summary.get("surrogate", "troll") != "troll"
    names = dict.fromkeys(name for row in rows for name in row)
    every = [*CHARTS, *evaluation_charts(names), *diagnostic_charts(names)]
    parts = []
    for section in dict.fromkeys(chart.section for chart in every):
        cards, missing = [], []
        for chart in (chart for chart in every if chart.section == section):
            data = {key: metric_points(rows, key) for key in chart.lines}
            if HELD_OUT in data:
                data[HELD_OUT] = held_out_success(rows, summary)
            if chart.shown == "if it changes" and not any(map(_changes, data.values())):
                continue
            if any(value > 0 or chart.scale != "log" for points in data.values() for _, value in points):
                shown_bound = bound if chart.with_bound else []
                cards.append(_card(chart, data, last, shown_bound, eval_size(summary), _note(chart, rows)))
            elif chart.shown == "always" and not (without_region and all(key.startswith(TRUST) for key in data)):
                why = "it was never above zero" if any(data.values()) else "this run logged no value of it"
                missing.append(f"<li>{chart.title} is left out: {why}.</li>")
        parts += [f"<h2>{section}</h2>"] if cards or missing else []
        parts += ['<div class="cards">', *cards, "</div>"] if cards else []
        parts += ['<ul class="missing">', *missing, "</ul>"] if missing else []
    return "\n".join(parts)


def _changes(points: Points) -> bool:
    return len({value for _, value in points}) > 1


def _note(chart: Chart, rows: Rows) -> str:
    """A note on whether an ill-conditioned projection shows in the gradient, if the run logged both."""
    notes = []
    norm = dict(metric_points(rows, GRADIENT_NORM))
    for key, label in chart.lines.items():
        if key.startswith(CONDITIONING):
            values = dict(metric_points(rows, key))
            steps = sorted(values.keys() & norm.keys())
            pairs = [[series[step] for step in steps] for series in (values, norm)]
            if len(steps) > 2 and all(len(set(series)) > 1 for series in pairs):  # else there is no correlation
                from scipy import stats

                shown = f"{stats.spearmanr(*pairs).statistic:+.2f}".replace("-", "−")
                notes.append(f"Rank correlation of {label} with the gradient norm: {shown}, over {len(steps)} steps.")
    return " ".join(notes)


def _card(chart: Chart, data: Mapping[str, Points], last: int, bound: Points, size: int | None, note: str) -> str:
    drawn = {key: escape(label) for key, label in chart.lines.items() if data[key]}
    caption = [chart.caption, note]
    if trained := [len(data[key]) for key in drawn if not key.startswith("eval_")]:
        caption.append(_smoothing_note(max(trained)))
    caption += [f"Not logged: {label}." for key, label in chart.lines.items() if key not in drawn]
    marks = {
        key: "points" if key.startswith("eval_") else COLOURS[place % len(COLOURS)]
        for place, key in enumerate(chart.lines)
    }
    legend = {label: marks[key] for key, label in drawn.items()}
    legend |= {f"bound ε{'' if _changes(bound) else f' = {bound[0][1]:g}'}": "bound"} if bound else {}
    title = escape(chart.title)
    slug = re.sub(r"\W+", "-", chart.title.lower())

    def paint(axes: Axes) -> None:
        for key, points in data.items():
            if key.startswith("eval_"):
                _draw_held_out(axes, points, size if key == HELD_OUT else None)
            else:
                _draw_line(axes, thin(points, _MOST_POINTS, key.endswith("_max")), LIGHT[marks[key]])
        set_scale(axes, chart.scale, [value for points in [*data.values(), bound] for _, value in points])
        if bound:
            _draw_bound(axes, bound)

    return figure_card(
        slug,
        f'{title} <span class="unit">{chart.unit}</span>',
        drawing(slug, title, paint, last_step=last),
        legend if len(chart.lines) > 1 or bound else None,
        " ".join(filter(None, caption)),
    )


def _smoothing_note(count: int) -> str:
    group = math.ceil(count / _MOST_POINTS)
    width = window(math.ceil(count / group))
    if width == 1:
        return ""
    faint = "logged values" if group == 1 else f"logged values, {group} to a point"
    return f"Faint: {faint}; bold: running mean of {width} points."


def _draw_line(axes: Axes, points: Points, colour: str) -> None:
    width = window(len(points))
    if width == 1:
        axes.plot(*columns(points), color=colour, marker=".")
    else:
        axes.plot(*columns(points), color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(*columns(running_mean(points, width)), color=colour)


def _draw_held_out(axes: Axes, points: Points, size: int | None) -> None:
    steps, values = columns(points)
    spread = None
    if size is not None:
        ends = [(value, *wilson_interval(value, size)) for value in values]
        # Rounding can put an end of the interval on the wrong side of 0 % or 100 %.
        spread = [
            [max(0.0, value - low) for value, low, _ in ends],
            [max(0.0, high - value) for value, _, high in ends],
        ]
    colour = LIGHT["second"]
    axes.errorbar(steps, values, spread, fmt="o", color=colour, markersize=4, elinewidth=1, clip_on=False, zorder=3)


def _draw_bound(axes: Axes, bound: Points) -> None:
    style: dict[str, Any] = {"color": LIGHT["ink"], "linewidth": 1, "linestyle": (0, (4, 3))}
    if _changes(bound):
        axes.plot(*columns(thin(bound, _MOST_POINTS)), **style)
    else:
        axes.axhline(bound[0][1], **style)
    end = axes.get_yaxis_transform()
    axes.annotate("ε", (1, bound[-1][1]), (4, 0), xycoords=end, textcoords="offset points", va="center", fontsize=10)
