"""Plots as inline SVG in the page's colours, with long lines made readable.

Colours are the page's CSS variables, so that the plots follow the reader's light or dark theme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]  # (optimiser step, value), one per step, in order
Scale = Literal["linear", "from zero", "percent", "log"]

_FEWEST_TO_SMOOTH = 12
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

LIGHT = {"paper": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "soft": "#5a6675", "rule": "#dde2e8"}
DARK = {"paper": "#11151b", "card": "#1a2028", "ink": "#e7ebf0", "soft": "#9ba7b5", "rule": "#313a46"}
LIGHT |= {"first": "#1d5fa9", "second": "#c2571b", "third": "#1f7a54"}
LIGHT |= {"fourth": "#8a3f96", "fifth": "#7a6412", "sixth": "#a8324f"}
DARK |= {"first": "#7cb5f2", "second": "#f2a065", "third": "#68c79b"}
DARK |= {"fourth": "#cf94da", "fifth": "#d3bb5c", "sixth": "#f08ca3"}

#: The colours of lines, in their order.
COLOURS = ("first", "second", "third", "fourth", "fifth", "sixth")
#: The dashes of lines that may lie on one another, in their order: the line below shows through the gaps. Below, the
#: style of each in a legend.
DASHES = ("-", (0, (5, 2.5)), (0, (1.5, 1.5)), (0, (6, 4, 1.5, 4)), (0, (3, 3)), (0, (1, 3)))
LEGEND_STYLES = ("solid", "dashed", "dotted", "dashed", "dashed", "dotted")

#: The style of every figure. The style "default", which comes first, undoes all that a user's matplotlibrc changes.
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["soft"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.6,
}
_CARD_STYLE = STYLE | {
    "text.color": LIGHT["soft"],
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
}


def window(count: int) -> int:
    """The points in the running mean of a line of `count` points; 1 leaves a short line unchanged."""
    return 1 if count < _FEWEST_TO_SMOOTH else max(5, count // 12) | 1


def thin(points: Points, most: int, largest: bool = False) -> Points:
    """Reduces a line to at most `most` points: means of neighbours, or the largest of them."""
    group = max(1, math.ceil(len(points) / most))
    chunks = [points[start : start + group] for start in range(0, len(points), group)]
    # A mean would hide the one step at which a maximum crossed the bound.
    pick = max if largest else fmean
    return [(chunk[len(chunk) // 2][0], pick(value for _, value in chunk)) for chunk in chunks]


def running_mean(points: Points, window: int) -> Points:
    """Each value replaced by the mean of the `window` values around it."""
    values = [value for _, value in points]
    half = window // 2
    return [(step, fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(points)]


def line_style(place: int) -> dict[str, Any]:
    """The colour and the dashes of the line with this number, as arguments of matplotlib's `plot`."""
    place %= len(COLOURS)
    return {"color": LIGHT[COLOURS[place]], "linestyle": DASHES[place]}


def line_mark(place: int) -> str:
    """The same in a legend, as classes of the page."""
    place %= len(COLOURS)
    return f"{COLOURS[place]} {LEGEND_STYLES[place]}"


def columns(points: Points) -> tuple[list[int], list[float]]:
    """Steps and values."""
    return [step for step, _ in points], [value for _, value in points]


def drawing(
    slug: str, title: str, paint: Callable[[Axes], None], height: float = 2.45, last_step: int | None = None
) -> str:
    """A plot as inline SVG.

    Args:
        slug: The card's id, unique on the page.
        title: The text for screen readers, as HTML.
        paint: Draws into the axes, and sets their scales.
        height: The height in inches; the width is 4.3.
        last_step: The end of a horizontal axis of optimiser steps; None for another axis, which `paint` sets.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError('the report needs matplotlib: pip install "troll-rl[report]"') from error

    with style.context(["default", {**_CARD_STYLE, "svg.hashsalt": slug}]):
        figure = Figure(figsize=(4.3, height))  # small, so that its text is legible on a phone
        # The same in every card, so that steps line up; below it the labels, above it half a label.
        axes = figure.add_axes((0.14, 0.45 / height, 0.815, 1 - 0.525 / height))
        if last_step is not None:
            axes.set_xlim(0, last_step * 1.01)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("optimiser step")
        paint(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _inline(written.getvalue(), slug, title)


def set_scale(axes: Axes, scale: Scale, seen: Sequence[float]) -> None:
    """Sets limits and labels of the vertical axis.

    Args:
        axes: The axes, with everything drawn.
        scale: The kind of scale; "percent" and "from zero" start at 0.
        seen: The values that a logarithmic axis has to show, at least one of them above 0.
    """
    if scale == "log":
        positive = [value for value in seen if value > 0]
        top = max(positive)
        # The first update of a rollout leaves rounding noise, decades below the values that matter.
        bottom = max(min(positive), median(positive) / 100)
        axes.set_yscale("log", nonpositive="mask")
        first = math.floor(math.log10(bottom))
        axes.set_ylim(10.0**first, 10.0 ** max(first + 1, math.ceil(math.log10(top))))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: "10" + f"{math.log10(value):.0f}".translate(_SUPERSCRIPT))
        return
    if scale != "linear":
        axes.set_ylim(0, axes.dataLim.y1 * 1.05 or 1)
    percent = scale == "percent"
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %" if percent else f"{value:g}".replace("-", "−"))


def _inline(svg: str, slug: str, title: str) -> str:
    """The plot as an element of the page, with unique ids, the page's colours, and no reference to anything outside."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    start = f'<svg {view_box[0]} role="img" aria-label="{title}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: start, svg, count=1)  # a title may have backslashes
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'( id="|href="#|url\(#)', lambda found: f"{found[1]}{slug}-", svg)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.strip()
