"""Curves of metrics over steps: long lines made readable, and the card of a chart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from troll_lab.evaluation.estimators import Interval
from troll_lab.reports.figures import COLOURS, LIGHT, Scale, inline_figure, set_scale, set_steps
from troll_lab.reports.page import Card

_MOST_POINTS = 400  # more points do not make a line more readable, and the page would exceed a megabyte
_FEWEST_TO_SMOOTH = 12

#: One curve, or several with the same steps: values by step.
Curves = TypeVar("Curves", pd.Series, pd.DataFrame)


@dataclass(frozen=True)
class Chart:
    """What a card shows.

    Attributes:
        lines: The text in the legend by metric; held-out metrics start with "eval_".
        with_bound: Whether ε is drawn too.
        shown: When the card is shown. With "always", a sentence replaces a card without data; otherwise it is left out.
    """

    title: str
    unit: str
    scale: Scale
    lines: Mapping[str, str]
    caption: str
    with_bound: bool = False
    shown: Literal["always", "if logged"] = "always"


def thin(curves: Curves, most: int, largest: bool = False) -> Curves:
    """Reduces curves to at most `most` points: means of neighbours, or the largest of them."""
    size, count = max(1, math.ceil(len(curves) / most)), len(curves)
    groups = curves.groupby(np.arange(count) // size)  # not of a list, which could be one of column names
    # A mean would hide the one step at which a maximum crossed the bound.
    thinned = groups.max() if largest else groups.mean()
    thinned.index = [curves.index[(start + min(start + size, count)) // 2] for start in range(0, count, size)]
    return thinned


def smooth(curves: Curves) -> Curves:
    """Each value replaced by the mean of the values around it; short curves stay as they are."""
    return curves.rolling(_window(len(curves)), center=True, min_periods=1).mean()


def curve_card(
    chart: Chart,
    data: Mapping[str, pd.Series],
    last: int,
    intervals: Mapping[str, Mapping[int, Interval]],
    bound: float | None = None,
    steps: str = "optimiser step",
) -> Card:
    """The card of a chart.

    Args:
        chart: Says what is drawn.
        data: The values by step of each metric of the chart, some of them empty.
        last: The last step of the axis.
        intervals: Intervals of held-out metrics by step.
        bound: ε, drawn as a dashed line.
        steps: The name of the horizontal axis.
    """
    held_out = [key for key in chart.lines if _held_out(key)]
    colours = {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(chart.lines)}
    colours |= {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(held_out, start=1)}
    marks = colours | {key: f"points {colours[key]}" for key in held_out}
    drawn = {key: curve for key, curve in data.items() if len(curve)}
    slug = re.sub(r"\W+", "-", chart.title.lower())

    def paint(axes: Axes) -> None:
        for key, curve in drawn.items():
            if _held_out(key):
                _draw_held_out(axes, curve, LIGHT[colours[key]], intervals.get(key, {}))
            else:
                _draw_line(axes, thin(curve, _MOST_POINTS, key.endswith("_max")), LIGHT[colours[key]])
        set_steps(axes, last, steps)
        seen = pd.concat(list(drawn.values())).tolist()
        set_scale(axes, chart.scale, seen if bound is None else [*seen, bound])
        if bound is not None:
            _draw_bound(axes, bound)

    legend = {chart.lines[key]: marks[key] for key in drawn} if len(chart.lines) > 1 or bound is not None else {}
    if bound is not None:
        legend[f"bound ε = {bound:g}"] = "bound"
    trained = [len(curve) for key, curve in drawn.items() if not _held_out(key)]
    missing = [f"Not logged: {label}." for key, label in chart.lines.items() if key not in drawn]
    caption = [chart.caption, _smoothing_note(max(trained, default=0)), *missing]
    figure = inline_figure(slug, chart.title, paint)
    return Card(slug, chart.title, figure, chart.unit, legend, " ".join(filter(None, caption)))


def _held_out(key: str) -> bool:
    return key.startswith("eval_")


def _window(count: int) -> int:
    """The points in the running mean of a line of `count` points; 1 leaves a short line unchanged."""
    return 1 if count < _FEWEST_TO_SMOOTH else max(5, count // 12) | 1


def _smoothing_note(count: int) -> str:
    group = max(1, math.ceil(count / _MOST_POINTS))
    width = _window(math.ceil(count / group))
    if width == 1:
        return ""
    faint = "logged values" if group == 1 else f"logged values, {group} to a point"
    return f"Faint: {faint}; bold: running mean of {width} points."


def _draw_line(axes: Axes, curve: pd.Series, colour: str) -> None:
    if len(curve) < _FEWEST_TO_SMOOTH:
        axes.plot(curve, color=colour, marker=".")
    else:
        axes.plot(curve, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(smooth(curve), color=colour)


def _draw_held_out(axes: Axes, curve: pd.Series, colour: str, intervals: Mapping[int, Interval]) -> None:
    # Rounding can put an end of the interval on the wrong side of 0 % or 100 %.
    ends = [intervals.get(step, (value, value)) for step, value in curve.items()]
    below = [max(0.0, value - low) for value, (low, _) in zip(curve, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(curve, ends, strict=True)]
    style: dict[str, Any] = {
        "fmt": "o",
        "color": colour,
        "markersize": 4,
        "elinewidth": 1,
        "clip_on": False,
        "zorder": 3,
    }
    axes.errorbar(curve.index, curve, [below, above] if intervals else None, **style)


def _draw_bound(axes: Axes, bound: float) -> None:
    axes.axhline(bound, color=LIGHT["ink"], linewidth=1, linestyle=(0, (4, 3)))
    end = axes.get_yaxis_transform()
    axes.annotate("ε", (1, bound), (4, 0), xycoords=end, textcoords="offset points", va="center", fontsize=10)
