"""The figures of the page. Each shows plain data, which its files carry in their metadata."""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from benchmarks.study.analysis import Section
from benchmarks.study.protocol import MARGIN, METHODS, REGIMES
from troll.files import write_atomically
from troll.study.contest import rate_text
from troll.study.plot import COLOURS, LIGHT, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The data of a figure, in numbers and words that JSON can hold.
Data = dict[str, Any]

_MARKERS, _DASHES = "osD^vP", ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5)))
_STYLE = STYLE | {
    "figure.facecolor": LIGHT["card"],  # a page may be dark
    "axes.facecolor": LIGHT["card"],
    "text.color": LIGHT["ink"],
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
}


def rate_data(section: Section) -> Data:
    """Success over the learning rate: for each method its mean, and the quartiles over seeds, by rate."""
    lines = {}
    for method in section.methods:
        quartiles = [np.quantile(list(finals.values()), [0.25, 0.75]) for finals in method.by_rate.values()]
        lines[method.label] = {
            "rate": list(method.by_rate),
            "mean": [_rounded(mean) for mean in method.means.values()],
            "low": [_rounded(low) for low, _ in quartiles],
            "high": [_rounded(high) for _, high in quartiles],
        }
    return {"title": _name(section), "lines": lines}


def contrast_data(sections: Sequence[Section]) -> Data:
    """TROLL minus each rival in each regime, in points, with t intervals if there are two seeds."""
    rows = []
    for section in sections:
        for contrast in section.contrasts:
            if contrast.estimate.interval is not None:
                low, high = contrast.estimate.interval
                points = {"mean": contrast.estimate.mean, "low": low, "high": high}
                names = {"regime": _name(section), "rival": contrast.second.label}
                rows.append(names | {name: _rounded(100 * value) for name, value in points.items()})
    return {"margin": 100 * MARGIN, "rows": rows}


def _name(section: Section) -> str:
    """The regime's name, with a note if runs are missing, since a figure may be seen without the page."""
    return REGIMES.get(section.regime, section.regime) + section.mark


def draw_rates(panels: Sequence[Data]) -> Figure:
    """Draws success over the learning rate, with one panel for each of the data from `rate_data`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels) + 0.7, 3.7), layout="constrained")
    labels = list(dict.fromkeys(label for panel in panels for label in panel["lines"]))
    top = max(high for panel in panels for line in panel["lines"].values() for high in line["high"])
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        _draw_lines(axes, panel, labels)
        axes.set_ylim(0, max(0.05, 1.05 * top))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        if place == 0:
            axes.set_ylabel("held-out success after training")
    return figure


def _draw_lines(axes: Axes, panel: Data, labels: Sequence[str]) -> None:
    lines = panel["lines"]
    rates = sorted({rate for line in lines.values() for rate in line["rate"]})
    ends = []
    for label, line in lines.items():
        place = labels.index(label)
        colour = LIGHT[COLOURS[place % len(COLOURS)]]
        # Side by side, or equal methods would hide each other.
        x = [rate * 10 ** (0.03 * (place - (len(labels) - 1) / 2)) for rate in line["rate"]]
        axes.vlines(x, line["low"], line["high"], color=colour, linewidth=1.2, alpha=0.55)
        style: dict[str, Any] = {"linestyle": _DASHES[place % len(_DASHES)], "marker": _MARKERS[place % len(_MARKERS)]}
        main = place == 0
        axes.plot(x, line["mean"], color=colour, linewidth=2.6 if main else 1.5, markersize=5, zorder=4 - main, **style)
        ends.append((label, x[-1], line["mean"][-1], colour))
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
    axes.set_xticks(rates, [rate_text(rate) for rate in rates])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("learning rate")
    axes.set_title(textwrap.fill(panel["title"], 50))
    tops = max(high for line in lines.values() for high in line["high"])
    texts = _apart([mean for _, _, mean, _ in ends], 0.062 * max(0.05, tops))
    for (label, _, mean, colour), y in zip(ends, texts, strict=True):
        axes.annotate(
            label, (1, mean), (1.02, y), xycoords=axes.get_yaxis_transform(), textcoords=axes.get_yaxis_transform(),
            color=colour, va="center", annotation_clip=False,
        )  # fmt: skip


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights at least a gap apart, in the same order and near where they were."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [heights[i] for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    shift = (sum(heights) - sum(placed)) / len(placed) if placed else 0.0
    found = [0.0] * len(heights)
    for i, height in zip(order, placed, strict=True):
        found[i] = height + max(shift, -placed[0])
    return found


def draw_contrasts(data: Data) -> Figure:
    """Differences with their intervals, and the band within which methods count as equal."""
    from matplotlib.figure import Figure

    rows, margin = data["rows"], data["margin"]
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    figure = Figure(figsize=(6.6, 0.7 + 0.27 * len(rows) + 0.36 * len(regimes)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-margin, margin, color=LIGHT["rule"], alpha=0.6, linewidth=0)
    axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)
    y, ticks = 0.0, []
    for regime in regimes:
        axes.annotate(
            regime, (0, y), xycoords=axes.get_yaxis_transform(), va="center", fontweight="bold",
            bbox={"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        for row in (row for row in rows if row["regime"] == regime):
            y -= 1
            place = [*METHODS.values()].index(row["rival"]) if row["rival"] in METHODS.values() else 0
            colour = LIGHT[COLOURS[place % len(COLOURS)]]
            axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1.8)
            axes.plot(row["mean"], y, "o", color=colour, markersize=6)
            ticks.append((y, f"minus {row['rival']}"))
        y -= 1.35
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(y + 0.6, 0.7)
    ends = [abs(row[end]) for row in rows for end in ("low", "high")]
    reach = 1.08 * max(2 * margin, *ends)
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("← TROLL is worse      points of held-out success      TROLL is better →")
    return figure


def save(figure: Figure, data: Data | Sequence[Data], path: Path) -> list[Path]:
    """Writes a figure as SVG and PNG; the same figure gives the same bytes.

    Args:
        figure: What is drawn.
        data: What it shows, for the metadata.
        path: Without a suffix.
    """
    svg = io.StringIO()
    text = json.dumps(data, ensure_ascii=False)
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Description": text})
    lines = [line.rstrip() for line in svg.getvalue().splitlines()]
    write_atomically(path.with_suffix(".svg"), "\n".join(lines) + "\n")
    figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None, "Description": text})
    return [path.with_suffix(".svg"), path.with_suffix(".png")]


def shown(path: Path) -> Any:
    """The data that a figure of `save` shows, from its SVG."""
    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    assert found is not None and found.text is not None, f"{path} does not say what it shows"
    return json.loads(found.text)


def style(name: str) -> dict[str, Any]:
    """Of a figure: everything that a reader's own matplotlibrc could change is set back before by "default"."""
    return {**_STYLE, "svg.hashsalt": name}


def _rounded(value: float) -> float:
    return round(float(value), 4) if math.isfinite(value) else value
