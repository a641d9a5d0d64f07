"""The table and the page at the end of the demo: what each method learned, how far it moved, and its curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

#: How far the policy has moved in an update, as verl estimates it for every method; and the tokens that moved too far,
#: which TROLL projects and the clip leaves out.
KL, OUTSIDE = "actor/ppo_kl", ("actor/trust_region/projected_fraction", "actor/pg_clipfrac")

#: Title, verl's names of the metric, of which a method logs one at most, its scale, and a sentence.
PLOTS: tuple[tuple[str, tuple[str, ...], Scale, str], ...] = (
    (
        "Held-out success",
        (HELD_OUT,),
        "percent",
        "512 problems that are not trained on, a completion each: the standard error is 2 points. Both start from one "
        "model, which is evaluated once.",
    ),
    ("Training success", ("critic/score/mean",), "percent", "Of a rollout's completions; a running mean."),
    (
        "Tokens outside the limit",
        OUTSIDE,
        "percent",
        "TROLL projects them back to the bound ε, the clip leaves them out of the gradient; a running mean.",
    ),
    (
        "Divergence from the old policy",
        (KL,),
        "linear",
        "KL(old ‖ new) of a token in an update, in nats, before TROLL projects it. verl estimates it from the sampled "
        "tokens, with noise that may make it negative; a running mean.",
    ),
    ("Entropy", ("actor/entropy",), "from zero", "Of the network as it scores a rollout, in nats; a running mean."),
)


def page(runs: Mapping[str, Metrics], limits: Mapping[str, str]) -> str:
    """The page, in one HTML file.

    Args:
        runs: By method, what verl logged.
        limits: By method, how far it lets the policy move, in words.
    """
    held_out = {name: metric(run, HELD_OUT) for name, run in runs.items()}
    return render(
        "demo_page.html",
        folder=Path(__file__).parent,
        start=next((percent(curve[0]) for curve in held_out.values() if 0 in curve), ""),
        outcome={name: curve.iloc[-1] for name, curve in held_out.items() if len(curve)},
        results=results(runs, limits),
        curves=[_card(number, *plot, runs) for number, plot in enumerate(PLOTS)],
    )


def metric(run: Metrics, name: str) -> pd.Series:
    """A metric over verl's steps, which are rollouts."""
    return pd.Series({step: values[name] for step, values in sorted(run.items()) if name in values}, dtype=float)


def median_seconds(run: Metrics) -> float:
    """Of a step, with its rollout and its updates."""
    return float(metric(run, STEP_SECONDS).median())


def results(runs: Mapping[str, Metrics], limits: Mapping[str, str]) -> pd.DataFrame:
    """The table: a method a row. KL and tokens outside the limit are means over the run, the time is the median.

    Args:
        runs: By method, what verl logged.
        limits: By method, how far it lets the policy move, in words.
    """
    rows = [
        {
            "method": name,
            "limit": limits[name],
            "before": percent(metric(run, HELD_OUT).iloc[0]),
            "after": percent(metric(run, HELD_OUT).iloc[-1]),
            "outside the limit": _mean(_one_of(run, OUTSIDE), percent),
            "KL, nats": _mean(metric(run, KL), "{:.4f}".format),
            "rollouts": max(run),
            "one takes": f"{median_seconds(run):.1f} s",
        }
        for name, run in runs.items()
    ]
    return pd.DataFrame(rows)


def _mean(curve: pd.Series, text: Callable[[float], str]) -> str:
    return text(curve.mean()) if len(curve) else "–"


def _one_of(run: Metrics, names: Sequence[str]) -> pd.Series:
    """The metric of these that the run logged; empty without one."""
    curves = [metric(run, name) for name in names]
    return next((curve for curve in curves if len(curve)), curves[0])


def _card(number: int, title: str, keys: Sequence[str], scale: Scale, note: str, runs: Mapping[str, Metrics]) -> Card:
    curves = [(name, place, smooth(_one_of(run, keys))) for place, (name, run) in enumerate(runs.items())]
    curves = [(name, place, curve) for name, place, curve in curves if len(curve)]

    def paint(axes: Axes) -> None:
        for _, place, curve in curves:
            axes.plot(curve, **line_style(place), marker="." if len(curve) <= 3 else "")
        set_steps(axes, max(curve.index[-1] for *_, curve in curves), "rollout")
        set_scale(axes, scale, pd.concat([curve for *_, curve in curves]).tolist())

    slug = f"plot-{number}"
    figure = inline_figure(slug, title, paint) if curves else None
    return Card(slug, title, figure, legend={name: line_mark(place) for name, place, _ in curves}, caption=note)
