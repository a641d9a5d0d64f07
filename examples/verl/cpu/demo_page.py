"""The page at the end of the demo: the final success of each method, and its curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from troll_lab.reports.curves import smooth
from troll_lab.reports.figures import Scale, inline_figure, line_mark, line_style, set_scale, set_steps
from troll_lab.reports.page import Card, render
from troll_lab.runs.text import percent

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
    held_out = {name: metric(run, HELD_OUT) for name, run in runs.items()}
    return render(
        "demo_page.html",
        folder=Path(__file__).parent,
        outcome={name: curve.iloc[-1] for name, curve in held_out.items() if len(curve)},
        results=_results(runs),
        curves=[_card(number, *plot, runs) for number, plot in enumerate(PLOTS)],
    )


def metric(run: Metrics, name: str) -> pd.Series:
    """A metric over verl's steps, which are rollouts."""
    return pd.Series({step: values[name] for step, values in sorted(run.items()) if name in values}, dtype=float)


def median_seconds(run: Metrics) -> float:
    """Of a step, with its rollout and its updates."""
    return float(metric(run, STEP_SECONDS).median())


def _results(runs: Mapping[str, Metrics]) -> pd.DataFrame:
    """The time of a step is the median."""
    rows = [
        {
            "method": name,
            "before": percent(metric(run, HELD_OUT).iloc[0]),
            "after": percent(metric(run, HELD_OUT).iloc[-1]),
            "a step": f"{median_seconds(run):.1f} s",
            "rollouts": max(run),
        }
        for name, run in runs.items()
    ]
    return pd.DataFrame(rows)


def _card(number: int, title: str, key: str, scale: Scale, note: str, runs: Mapping[str, Metrics]) -> Card:
    curves = [(name, place, smooth(metric(run, key))) for place, (name, run) in enumerate(runs.items())]
    curves = [(name, place, curve) for name, place, curve in curves if len(curve)]

    def paint(axes: Axes) -> None:
        for _, place, curve in curves:
            axes.plot(curve, **line_style(place), marker="." if len(curve) <= 3 else "")
        set_steps(axes, max(curve.index[-1] for *_, curve in curves), "rollout")
        set_scale(axes, scale, pd.concat([curve for *_, curve in curves]).tolist())

    slug = f"plot-{number}"
    figure = inline_figure(slug, title, paint) if curves else None
    return Card(slug, title, figure, legend={name: line_mark(place) for name, place, _ in curves}, caption=note)
