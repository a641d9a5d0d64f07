"""Figures as inline SVG in the page's colours, in the reader's light or dark theme, and the style of all figures."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

Scale = Literal["linear", "from zero", "percent", "log"]

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

#: The colours of pages, by the names of their CSS variables.
LIGHT = {"paper": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "soft": "#5a6675", "rule": "#dde2e8"}
DARK = {"paper": "#11151b", "card": "#1a2028", "ink": "#e7ebf0", "soft": "#9ba7b5", "rule": "#313a46"}
LIGHT |= {"first": "#1d5fa9", "second": "#c2571b", "third": "#1f7a54"}
LIGHT |= {"fourth": "#8a3f96", "fifth": "#7a6412", "sixth": "#a8324f"}
DARK |= {"first": "#7cb5f2", "second": "#f2a065", "third": "#68c79b"}
DARK |= {"fourth": "#cf94da", "fifth": "#d3bb5c", "sixth": "#f08ca3"}

#: The colours of lines, in their order.
COLOURS = ("first", "second", "third", "fourth", "fifth", "sixth")
# The dashes of lines that may lie on one another, in their order: the line below shows through the gaps. Below, the
# style of each in a legend.
_DASHES = ("-", (0, (5, 2.5)), (0, (1.5, 1.5)), (0, (6, 4, 1.5, 4)), (0, (3, 3)), (0, (1, 3)))
_LEGEND_STYLES = ("solid", "dashed", "dotted", "dashed", "dashed", "dotted")

#: The style of every figure. The style "default", which comes first, undoes every change of a user's matplotlibrc.
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


def line_style(place: int) -> dict[str, Any]:
    """The colour and the dashes of the line with this number, as arguments of matplotlib's `plot`."""
    place %= len(COLOURS)
    return {"color": LIGHT[COLOURS[place]], "linestyle": _DASHES[place]}


def line_mark(place: int) -> str:
    """The same in a legend, as classes of the page."""
    place %= len(COLOURS)
    return f"{COLOURS[place]} {_LEGEND_STYLES[place]}"


def inline_figure(slug: str, title: str, paint: Callable[[Axes], None], height: float = 2.45) -> Markup:
    """A figure of one pair of axes as inline SVG.

    Args:
        slug: The card's id, unique on the page.
        title: The text for screen readers.
        paint: Draws into the axes, and sets their scales.
        height: The height in inches; the width is 4.3.
    """
    with style.context(["default", {**_CARD_STYLE, "svg.hashsalt": slug}]):
        figure = Figure(figsize=(4.3, height))  # small, so that its text is legible on a phone
        # The same in every card, so that steps line up; below it the labels, above it half a label.
        axes = figure.add_axes((0.14, 0.45 / height, 0.815, 1 - 0.525 / height))
        paint(axes)
        return themed_svg(figure, slug, title)


def themed_svg(figure: Figure, slug: str, title: str) -> Markup:
    """A figure as an SVG element in the page's colours, with unique ids and without references to anything outside.

    Args:
        figure: Drawn in the colours of `LIGHT`, which become CSS variables.
        slug: Begins all ids.
        title: The text for screen readers.
    """
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", written.getvalue(), flags=re.DOTALL)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    inside = svg[svg.index(">", svg.index("<svg")) + 1 :].strip()
    inside = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{slug}-", inside.replace("xlink:href", "href"))
    for name, colour in LIGHT.items():
        inside = inside.replace(colour, f"var(--{name})")
    return Markup(f'<svg {view_box[0]} role="img" aria-label="{escape(title)}">{inside}')


def set_steps(axes: Axes, last: int, label: str = "optimiser step") -> None:
    """Makes the horizontal axis one of steps, from 0 to the last."""
    axes.set_xlim(0, last * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel(label)
    if last >= 100_000:
        axes.xaxis.set_major_formatter(EngFormatter())


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
    format_values(axes.yaxis, percent=scale == "percent")


def format_values(axis: Axis, percent: bool, unit: str = " %", sign: bool = False) -> None:
    """Labels an axis of shares in per cent, of other values as they are.

    Args:
        axis: The axis.
        percent: Whether its values are shares.
        unit: The text after a share.
        sign: Whether positive values show their sign.
    """

    def label(value: float, _: object) -> str:
        value = round(100 * value if percent else value, 9)
        return f"{value:{'+' if sign and value else ''}g}".replace("-", "−") + (unit if percent else "")

    axis.set_major_formatter(label)
