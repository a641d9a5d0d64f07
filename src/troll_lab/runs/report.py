"""The page about one run: its held-out success, its curves and its settings in a single HTML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troll.files import write_atomically
from troll_lab.runs.charts import (
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
from troll_lab.runs.page_frame import duration, figure_card, percent, render
from troll_lab.runs.plot import COLOURS, LIGHT, Points, columns, drawing, running_mean, set_scale, thin, window
from troll_lab.runs.recorded import (
    SHARE,
    Rows,
    eval_questions,
    metric_points,
    number,
    read_metrics,
    read_summary,
)
from troll_lab.runs.statistics import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 400  # more points do not make a line more readable, and the page would exceed a megabyte
_FACTS = {
    "status": "Status",
    "recipe": "Recipe",
    "task": "Task",
    "model": "Model",
    "surrogate": "Surrogate",
    "advantage_estimator": "Advantage estimator",
    "kl_bound": "KL bound ε",
    "steps": "Optimiser steps",
    "rollouts": "Rollouts",
    "updates_per_rollout": "Updates per rollout",
    "eval_size": "Held-out problems",
    "seed": "Seed",
    "machine": "Machine",
}


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` of a run, finished or not, from the files of its folder.

    It reads `config.yaml` (which the page shows unchanged), `summary.json` and `metrics.jsonl`. Each file and each key
    may be missing. The same files give the same bytes, and an earlier report is replaced atomically.

    Args:
        run_folder: The folder that `troll train` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If the folder holds none of the three files.
        ValueError: If a file is malformed. A last line of metrics that a crash cut short is left out instead.
        ImportError: If matplotlib is not installed.
    """
    config, metrics = run_folder / "config.yaml", run_folder / "metrics.jsonl"
    if not any(path.is_file() for path in (config, run_folder / "summary.json", metrics)):
        raise FileNotFoundError(
            f"{run_folder} is not a run folder: it has no config.yaml, summary.json or metrics.jsonl"
        )
    summary = read_summary(run_folder)
    rows = read_metrics(metrics) if metrics.is_file() else []
    name = str(summary.get("recipe") or run_folder.resolve().name)
    heading = f"TROLL · {escape(name)}"
    if (status := summary.get("status")) in ("interrupted", "failed"):
        heading += f'<span class="interrupted">{status}</span>'
    steps = sorted({row["step"] for row in rows})
    logged = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}." if steps else "No step was logged."
    page = render(
        title=f"TROLL: {name}",
        heading=heading,
        headline=_headline(summary),
        body="\n".join([_curves(rows, summary), "<h2>The run</h2>", _facts(summary), _configuration(config)]),
        footer=f"{logged} Written by <code>troll report</code>.",
    )
    report = run_folder / "report.html"
    write_atomically(report, page)
    return report


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = (number(summary.get(key), SHARE) for key in ("success_before", "success_after"))
    rollouts, seconds = number(summary.get("rollouts")), number(summary.get("training_seconds"))
    effort = [f"{rollouts:g} rollouts"] if rollouts is not None else []
    effort += [duration(seconds)] if seconds is not None else []
    outcome = [f"in {', '.join(effort)}"] if effort else []
    label = "Held-out success"
    if before is not None and after is not None:
        shown = f"{percent(before)} → <b>{percent(after)}</b>"
        outcome.insert(0, f"{100 * (after - before):+.1f} points".replace("-", "−"))
    elif after is not None:
        label, shown = "Held-out success after training", f"<b>{percent(after)}</b>"
    elif before is not None:
        label, shown = "Held-out success before training", percent(before)
    elif (rewards := [number(summary.get(f"reward_{when}")) for when in ("before", "after")]) != [None, None]:
        # The task cannot tell success from failure.
        first, last = ("not measured" if reward is None else f"{reward:.3g}" for reward in rewards)
        label, shown = "Held-out reward", f"{first} → <b>{last}</b>"
    else:
        shown = "not measured"
    parts = [f'<p class="headline"><span class="label">{label}</span> {shown}</p>']
    if outcome:
        parts.append(f'<p class="outcome">{", ".join(outcome)}</p>')
    size = eval_questions(summary)
    ends = [(when, share) for when, share in (("before", before), ("after", after)) if share is not None]
    if size is not None and ends:
        intervals = "; ".join(f"{when} {_interval(share, size)}" for when, share in ends)
        parts.append(f'<p class="note">95 % intervals from {size:g} different held-out problems: {intervals}.</p>')
    return "\n".join(parts)


def _interval(share: float, size: int) -> str:
    low, high = wilson_interval(share, size)
    return f"{100 * low:.1f}–{percent(high)}"


def _facts(summary: Mapping[str, Any]) -> str:
    facts = {label: str(summary[key]) for key, label in _FACTS.items() if summary.get(key) is not None}
    if (seconds := number(summary.get("training_seconds"))) is not None:
        facts["Time in training steps"] = duration(seconds)
    versions = summary.get("versions")
    if isinstance(versions, dict) and versions:
        facts["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not facts:
        return '<p class="note">The run left no summary.</p>'
    rows = "\n".join(f"<div><dt>{label}</dt><dd>{escape(value)}</dd></div>" for label, value in facts.items())
    return f'<div class="card"><dl class="facts">\n{rows}\n</dl></div>'


def _configuration(path: Path) -> str:
    if not path.is_file():
        return '<p class="note">The run left no config.yaml.</p>'
    text = escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>Configuration</summary><pre>{text}</pre></details>"


def _curves(rows: Rows, summary: Mapping[str, Any]) -> str:
    """The cards of all curves with data, and a sentence for each chart that should have data and has none."""
    if not rows:
        return '<p class="note">No step was logged, so there are no curves.</p>'
    bound = metric_points(rows, BOUND)
    fixed = number(summary.get("kl_bound"), (1e-300, math.inf))
    last = max(1, int(number(summary.get("steps")) or 0), *(row["step"] for row in rows))
    if not _changes(bound):
        bound = [] if fixed is None else [(0, fixed)]
    # The charts of a trust region are not missing in a run without one.
    without_region = summary.get("surrogate", "troll") != "troll"
    names = dict.fromkeys(name for row in rows for name in row)
    every = [*CHARTS, *evaluation_charts(names), *diagnostic_charts(names)]
    parts = []
    for section in dict.fromkeys(chart.section for chart in every):
        cards, missing = [], []
        for chart in (chart for chart in every if chart.section == section):
            data = {key: metric_points(rows, key) for key in chart.lines}
            if chart.shown == "if it changes" and not any(map(_changes, data.values())):
                continue
            if any(value > 0 or chart.scale != "log" for points in data.values() for _, value in points):
                shown_bound = bound if chart.with_bound else []
                cards.append(_card(chart, data, last, shown_bound, eval_questions(summary), _note(chart, rows)))
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
