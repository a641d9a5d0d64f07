"""The page at the end of the demo: the final success of each method, and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from troll_lab.runs.page_frame import html_table, percent, render
from troll_lab.runs.plot import COLOURS, DASHES, LEGEND_STYLES, LIGHT, columns, drawing, running_mean, set_scale, window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from troll_lab.runs.plot import Points, Scale

#: What verl logs, by step.
Metrics = Mapping[int, Mapping[str, float]]

HELD_OUT = "val-core/reasoning_gym:chain_sum/acc/mean@1"
STEP_SECONDS = "timing_s/step"

#: Title, verl's name of the metric, its scale, and a sentence.
PLOTS: tuple[tuple[str, str, Scale, str], ...] = (
    (
        "Held-out success",
        HELD_OUT,
        "percent",
        "512 problems that are not trained on, a completion each: the standard error is 2 points.",
    ),
    ("Training success", "critic/score/mean", "percent", "Of a rollout's completions; a running mean."),
    ("Entropy", "actor/entropy", "from zero", "Of the network as it scores a rollout, in nats; a running mean."),
    (
        "Divergence from the old policy",
        "actor/trust_region/kl_before_mean",
        "from zero",
        "KL(p̃ ‖ p) of a token in an update, in nats; a running mean. The clip has no such number.",
    ),
)


def page(runs: Mapping[str, Metrics]) -> str:
    """The page, in one HTML file.

    Args:
        runs: By method, what verl logged.
    """
    curves = {name: metric_points(run, HELD_OUT) for name, run in runs.items()}
    outcome = ", ".join(f"{escape(name)} <b>{percent(points[-1][1])}</b>" for name, points in curves.items() if points)
    cards = "".join(_card(number, *plot, runs) for number, plot in enumerate(PLOTS))
    return render(
        "verl on a CPU",
        "verl's unmodified trainer on a CPU, two Ray workers",
        f'<p class="headline">{outcome}</p><p class="outcome">held-out success after training</p>',
        f"<h2>Held-out success, before and after training</h2>{_table(runs)}"
        f'<h2>Curves</h2><div class="cards">{cards}</div>',
        "One run each: a difference of a few points is chance. docs/results.md has the study.",
    )


def metric_points(run: Metrics, name: str) -> Points:
    """A metric over verl's steps, which are rollouts."""
    return [(step, values[name]) for step, values in sorted(run.items()) if name in values]


def median_seconds(run: Metrics) -> float:
    """Of a step, with its rollout and its updates."""
    seconds = sorted(values[STEP_SECONDS] for values in run.values() if STEP_SECONDS in values)
    return seconds[len(seconds) // 2]


def _table(runs: Mapping[str, Metrics]) -> str:
    """The time of a step is the median."""
    rows = []
    for name, run in runs.items():
        held_out = metric_points(run, HELD_OUT)
        rows.append(
            [
                escape(name),
                percent(held_out[0][1]),
                percent(held_out[-1][1]),
                f"{median_seconds(run):.1f} s",
                str(max(run)),
            ]
        )
    return html_table(["method", "before", "after", "a step", "rollouts"], rows)


def _card(number: int, title: str, metric: str, scale: Scale, note: str, runs: Mapping[str, Metrics]) -> str:
    lines = {name: metric_points(run, metric) for name, run in runs.items()}
    places = {name: place for place, name in enumerate(lines)}
    lines = {name: running_mean(points, window(len(points))) for name, points in lines.items() if points}

    def paint(axes: Axes) -> None:
        for name, points in lines.items():
            steps, values = columns(points)
            marker = "." if len(points) <= 3 else ""
            axes.plot(steps, values, color=LIGHT[COLOURS[places[name]]], linestyle=DASHES[places[name]], marker=marker)
        axes.set_xlabel("rollout")
        set_scale(axes, scale, [value for points in lines.values() for _, value in points])

    legend = "".join(
        f'<li><i class="{COLOURS[places[name]]} {LEGEND_STYLES[places[name]]}"></i>{escape(name)}</li>'
        for name in lines
    )
    plot = drawing(f"plot-{number}", title, paint) if lines else "<p>Nothing was logged.</p>"
    return (
        f'<figure class="card"><h3>{title}</h3><ul class="legend">{legend}</ul>{plot}'
        f"<figcaption>{escape(note)}</figcaption></figure>"
    )
