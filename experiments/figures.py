"""The figures of the page. Each shows plain data, which its files carry in their metadata."""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from experiments import second, third, third_analysis
from experiments.analysis import Method, Section
from experiments.contest import rate_text
from experiments.protocol import MARGIN, METHODS, REGIMES
from troll.files import write_atomically
from troll_lab.reports.figures import COLOURS, LIGHT, STYLE
from troll_lab.runs.statistics import SeedMean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The data of a figure, in numbers and words that JSON can hold.
Data = dict[str, Any]

_MARKERS, _DASHES = "osD^vP", ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 1.5)))
#: The colour, mark and dashes of each method, in the figures of both parts.
_PLACES = {label: place for place, label in enumerate(METHODS.values())}
_PLACES |= {second.METHODS["bounded-penalty"].name: 4, second.METHODS["proximal"].name: 5}
_STYLE = STYLE | {
    "figure.facecolor": LIGHT["card"],  # a page may be dark
    "axes.facecolor": LIGHT["card"],
    "text.color": LIGHT["ink"],
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
}


@dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet.

    Attributes:
        data: What it shows.
        draw: Draws the data.
        caption: What it is, in words.
    """

    data: Any
    draw: Callable[[Any], Figure]
    caption: str


def rates(panels: Sequence[tuple[str, Sequence[Method]]]) -> Drawing:
    """Success over the learning rate, with one panel for each regime, whose name and methods are given."""
    data = [rate_data(title, methods) for title, methods in panels if methods]
    return Drawing(data, draw_rates, "Held-out success over the learning rate")


def contrasts(base: str, rows: Sequence[tuple[str, str, SeedMean | None]]) -> Drawing:
    """A method minus each rival in each regime, from the names of regime and rival and the difference."""
    data = {"base": base, "rows": contrast_data(rows)}
    return Drawing(data if data["rows"] else None, draw_contrasts, f"{base} minus each rival")


def seeds(sections: Sequence[Section]) -> Drawing:
    """Success of each method at each rate, with a dot for each seed."""
    return Drawing(seed_data(sections), draw_seeds, "Held-out success of each seed, by method")


def followed(lines: Sequence[Data]) -> Drawing:
    """The learning rate, and the KL measured and wanted, over the updates of runs with a KL target."""
    return Drawing(lines, draw_followed, "Learning rate and KL of runs with one KL target, from different starts")


def starts(panels: Sequence[tuple[third_analysis.Contest, Mapping[str, Method]]]) -> Drawing:
    """Success over `learning_rate`, with the KL target and without it.

    Args:
        panels: The third part's runs of a regime, and the second part's methods there, by their keys.
    """
    data = [start_data(found, former) for found, former in panels if found.size]
    return Drawing(data, draw_starts, "Held-out success over learning_rate, with a KL target (thick) and without it")


def start_data(found: third_analysis.Contest, former: Mapping[str, Method]) -> Data:
    """For each method the mean success over seeds, at the starts with the target and at constant rates."""
    lines = {}
    for key in found.regime.methods:
        targeted = [(arm.rate, found.runs[arm].values()) for arm in found.at(key)[:-1] if found.runs[arm]]
        means = former[key].means if key in former else {}
        lines[second.METHODS[key].name] = {
            "start": [rate for rate, _ in targeted],
            "with": [_rounded(fmean(run.success_after for run in runs)) for _, runs in targeted],
            "rate": list(means),
            "without": [_rounded(mean) for mean in means.values()],
        }
    return {"title": found.regime.name, "lines": lines}


def rate_data(title: str, methods: Sequence[Method]) -> Data:
    """Success over the learning rate: for each method its mean, and the quartiles over seeds, by rate."""
    lines = {}
    for method in methods:
        quartiles = [np.quantile(list(finals.values()), [0.25, 0.75]) for finals in method.by_rate.values()]
        lines[method.label] = {
            "rate": list(method.by_rate),
            "mean": [_rounded(mean) for mean in method.means.values()],
            "low": [_rounded(low) for low, _ in quartiles],
            "high": [_rounded(high) for _, high in quartiles],
        }
    return {"title": title, "lines": lines}


def contrast_data(rows: Sequence[tuple[str, str, SeedMean | None]]) -> list[Data]:
    """Differences in points, with their t intervals, of those with two seeds."""
    found = []
    for regime, rival, estimate in rows:
        if estimate is not None and estimate.interval is not None:
            low, high = estimate.interval
            points = {"mean": estimate.mean, "low": low, "high": high}
            found.append(
                {"regime": regime, "rival": rival} | {name: _rounded(100 * value) for name, value in points.items()}
            )
    return found


def seed_data(sections: Sequence[Section]) -> list[Data]:
    """Success after training of each seed, by regime, method and rate."""
    return [
        {
            "regime": REGIMES.get(section.regime, section.regime),
            "method": method.label,
            "rate": rate,
            "success": [_rounded(final) for final in finals.values()],
        }
        for section in sections
        for method in section.methods
        for rate, finals in method.by_rate.items()
    ]


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


def draw_starts(panels: Sequence[Data]) -> Figure:
    """Draws the data from `start_data`, a panel for each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels) + 0.3, 4.0), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for label, line in panel["lines"].items():
            place = _PLACES.get(label, 0)
            style: dict[str, Any] = {"color": LIGHT[COLOURS[place]], "marker": _MARKERS[place], "label": label}
            axes.plot(line["start"], line["with"], linewidth=2.6, markersize=7, zorder=4, **style)
            axes.plot(line["rate"], line["without"], linewidth=1.2, markersize=4, linestyle=_DASHES[1], **style)
        axes.set_xscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.grid(axis="y")
        axes.set_xlabel("learning_rate")
        axes.set_title(textwrap.fill(panel["title"], 50))
    row[0].set_ylim(bottom=0)
    row[0].set_ylabel("held-out success after training")
    handles, names = row[0].get_legend_handles_labels()
    shown = dict(zip(reversed(names), reversed(handles), strict=True))
    labels, title = list(panels[0]["lines"]), f"thick: with a KL target of {third.TARGET:g} nats a token"
    figure.legend([shown[name] for name in labels], labels, title=title, ncols=len(labels), loc="outside upper center")
    return figure


def _draw_lines(axes: Axes, panel: Data, labels: Sequence[str]) -> None:
    lines = panel["lines"]
    learning_rates = sorted({rate for line in lines.values() for rate in line["rate"]})
    ends = []
    for label, line in lines.items():
        order = labels.index(label)
        place = _PLACES.get(label, order)
        colour = LIGHT[COLOURS[place % len(COLOURS)]]
        # Side by side, or equal methods would hide each other.
        x = [rate * 10 ** (0.03 * (order - (len(labels) - 1) / 2)) for rate in line["rate"]]
        axes.vlines(x, line["low"], line["high"], color=colour, linewidth=1.2, alpha=0.55)
        style: dict[str, Any] = {"linestyle": _DASHES[place % len(_DASHES)], "marker": _MARKERS[place % len(_MARKERS)]}
        main = order == 0
        axes.plot(x, line["mean"], color=colour, linewidth=2.6 if main else 1.5, markersize=5, zorder=4 - main, **style)
        ends.append((label, x[-1], line["mean"][-1], colour))
    axes.set_xscale("log")
    axes.set_xlim(learning_rates[0] / 1.3, learning_rates[-1] * 1.3)
    axes.set_xticks(learning_rates, [rate_text(rate) for rate in learning_rates])
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
    """Draws differences with their intervals, and the band within which methods count as equal."""
    base, rows = data["base"], data["rows"]
    figure, axes, heights = _rows([(row["regime"], f"minus {row['rival']}") for row in rows], 0.27)
    margin = 100 * MARGIN
    axes.axvspan(-margin, margin, color=LIGHT["rule"], alpha=0.6, linewidth=0)
    axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)
    for row, y in zip(rows, heights, strict=True):
        colour = LIGHT[COLOURS[_PLACES.get(row["rival"], 0)]]
        axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1.8)
        axes.plot(row["mean"], y, "o", color=colour, markersize=6)
    ends = [abs(row[end]) for row in rows for end in ("low", "high")]
    reach = 1.08 * max(2 * margin, *ends)
    axes.set_xlim(-reach, reach)
    gap = "\N{EM SPACE}" * 2  # browsers show several plain spaces as one
    axes.set_xlabel(f"← worse{gap}{base}, points of held-out success{gap}better →")
    return figure


def draw_seeds(data: Sequence[Data]) -> Figure:
    """Draws a dot for each seed and a bar for their mean, in a colour for each rate."""
    learning_rates = sorted({row["rate"] for row in data})
    labels = list(dict.fromkeys((row["regime"], row["method"]) for row in data))
    figure, axes, heights = _rows(labels, 0.24 + 0.06 * len(learning_rates))
    places = dict(zip(labels, heights, strict=True))
    for row in data:
        label = (row["regime"], row["method"])
        own = [other["rate"] for other in data if (other["regime"], other["method"]) == label]
        y = places[label] - 0.22 * (own.index(row["rate"]) - (len(own) - 1) / 2)
        colour = LIGHT[COLOURS[learning_rates.index(row["rate"]) % len(COLOURS)]]
        mean = float(np.mean(row["success"]))
        axes.plot(row["success"], [y] * len(row["success"]), "o", color=colour, markersize=4, alpha=0.5, linewidth=0)
        axes.plot([mean, mean], [y - 0.16, y + 0.16], color=colour, linewidth=2.6, label=rate_text(row["rate"]))
    axes.set_xlim(left=-0.01)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.grid(axis="x")
    axes.set_xlabel("held-out success after training")
    if len(learning_rates) > 1:
        lines, names = axes.get_legend_handles_labels()
        shown = dict(zip(names, lines, strict=True))
        names = [rate_text(rate) for rate in learning_rates]
        handles = [shown[name] for name in names]
        figure.legend(handles, names, title="learning rate", ncols=len(names), loc="outside upper center")
    return figure


def draw_followed(lines: Sequence[Data]) -> Figure:
    """Draws the data from `experiments.followed`: rates above, KLs below, a column for each surrogate."""
    from matplotlib.figure import Figure

    surrogates = list(dict.fromkeys(line["surrogate"] for line in lines))
    starts = sorted({line["start"] for line in lines})
    figure = Figure(figsize=(4.2 * len(surrogates) + 0.7, 5.4), layout="constrained")
    panels = figure.subplots(2, len(surrogates), sharex=True, sharey="row", squeeze=False)
    for line in lines:
        rates, kls = panels[:, surrogates.index(line["surrogate"])]
        colour = LIGHT[COLOURS[starts.index(line["start"]) % len(COLOURS)]]
        rates.plot(line["step"], line["rate"], color=colour, linewidth=1.4, label=rate_text(line["start"]))
        kls.plot(line["step"], line["kl"], color=colour, linewidth=1.0, alpha=0.8)
        kls.plot(line["step"], line["wanted"], color=LIGHT["ink"], linewidth=1.6, linestyle=_DASHES[1])
    for place, surrogate in enumerate(surrogates):
        panels[0, place].set_title(METHODS[surrogate])
        panels[1, place].set_xlabel("updates")
    for row, name in zip(panels, ("learning rate", "mean KL (dashed: wanted)"), strict=True):
        row[0].set_yscale("log")
        row[0].set_ylabel(name)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, names, title="learning_rate, where the search begins", ncols=len(names), loc="outside upper center"
    )
    return figure


def _rows(labels: Sequence[tuple[str, str]], height: float) -> tuple[Figure, Axes, list[float]]:
    """A figure with a labelled row for each regime and name, below the name of its regime, and the rows' heights."""
    from matplotlib.figure import Figure

    regimes = list(dict.fromkeys(regime for regime, _ in labels))
    figure = Figure(figsize=(6.6, 0.7 + height * len(labels) + 0.36 * len(regimes)), layout="constrained")
    axes = figure.add_subplot()
    heights, y = [], 0.0
    for place, (regime, _) in enumerate(labels):
        if place == 0 or regime != labels[place - 1][0]:
            y -= 1.35 if place else 0.0
            axes.annotate(
                regime, (0, y), xycoords=axes.get_yaxis_transform(), va="center", fontweight="bold", zorder=5,
                bbox={"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        y -= 1
        heights.append(y)
    axes.set_yticks(heights, [textwrap.fill(label, 42, break_on_hyphens=False) for _, label in labels])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(y - 0.75, 0.7)
    return figure, axes, heights


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


def save_svg(draw: Callable[[], Figure], path: Path) -> None:
    """Draws and writes a figure of another page: its texts are text, and its names do not change from run to run.

    Args:
        draw: Draws the figure, within the style.
        path: The file.
    """
    from matplotlib import style as matplotlib_style

    with matplotlib_style.context(["default", STYLE, {"svg.hashsalt": path.stem}]):
        draw().savefig(path, metadata={"Date": None})


def style(name: str) -> dict[str, Any]:
    """Of a figure: everything that a reader's own matplotlibrc could change is set back before by "default"."""
    return {**_STYLE, "svg.hashsalt": name}


def _rounded(value: float) -> float:
    return round(float(value), 4) if math.isfinite(value) else value
