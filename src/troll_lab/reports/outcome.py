"""Results and paired differences as dots with intervals: the first part of a comparison's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from troll_lab.evaluation.estimators import Interval
from troll_lab.reports.figures import LIGHT, format_values, inline_figure, line_style
from troll_lab.reports.page import Card, Section
from troll_lab.runs.comparison import Difference, M, panels
from troll_lab.runs.comparison_tables import (
    DIFFERENCE_UNITS,
    UNITS,
    formatted,
    interval_of,
    plain_difference,
    result_interval,
)
from troll_lab.runs.recorded import Measure
from troll_lab.runs.statistics import seed_differences

_PER_LINE, _MARGINS = 0.52, 0.75  # inches for each method, and for the axis with its labels
_DOT_NOTE = (
    "Dot: mean over seeds; bar: its 95 % interval; circles below: single seeds. A difference whose bar crosses 0 is "
    "no evidence."
)


def outcome_section(methods: Sequence[M], differences: Sequence[Difference[M]], notes: Sequence[str] = ()) -> Section:
    """The section of the page with a figure of the results and one of the differences for each panel.

    It has no cards if no method has a result. The notes follow the explanation of the dots.
    """
    cards = []
    for number, (title, members) in enumerate(panels(methods), start=1):
        measure = next(iter(members.values())).measure
        lines = [
            _Line(
                f"{label}   {formatted(final.mean, measure)}{UNITS[measure]}",
                place,
                final.mean,
                result_interval(final, measure),
                list(method.finals.values()),
            )
            for place, (label, method) in enumerate(members.items())
            if (final := method.final) is not None
        ]
        if not lines:
            continue
        cards.append(_dots(f"outcome-{number}", title, f"final held-out {measure}", lines, measure))
        lines = [
            _Line(
                f"{short_name(found.first, members)} − {short_name(found.second, members)}   "
                f"{plain_difference(found.estimate, measure)}{DIFFERENCE_UNITS[measure]}",
                list(members.values()).index(found.second) if found.second in members.values() else place,
                found.estimate.mean,
                interval_of(found.estimate),
                seed_differences(found.first.finals, found.second.finals),
            )
            for place, found in enumerate(found for found in differences if found.first in members.values())
        ]
        if lines:
            cards.append(_dots(f"lead-{number}", title, "paired difference, seed by seed", lines, measure, zero=True))
    return Section("Outcome", cards, " ".join([_DOT_NOTE, *notes]))


def short_name(method: M, members: Mapping[str, M]) -> str:
    """The name of a method in its panel; in another panel, its label."""
    return next((label for label, member in members.items() if member is method), method.label)


@dataclass(frozen=True)
class _Line:
    """A line of a dot plot: its text, the place of its colour, the mean with its interval, and the single seeds."""

    text: str
    place: int
    mean: float
    interval: Interval | None
    seeds: Sequence[float]


def _dots(slug: str, title: str, what: str, lines: Sequence[_Line], measure: Measure, zero: bool = False) -> Card:
    def paint(axes: Axes) -> None:
        if zero:
            axes.axvline(0, color=LIGHT["ink"], linewidth=1)
        for line, y in zip(lines, range(len(lines) - 1, -1, -1), strict=True):
            colour = line_style(line.place)["color"]
            # Below the bar, which would hide them; circles stay countable where seeds are close.
            circles = {"color": colour, "markerfacecolor": "none", "markersize": 5, "markeredgewidth": 1}
            axes.plot(line.seeds, [y - 0.2] * len(line.seeds), "o", **circles)
            if line.interval is not None:
                axes.plot(line.interval, [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
            axes.plot([line.mean], [y], "o", color=colour, markersize=7)
            axes.text(
                *(0, y + 0.22, line.text),
                transform=axes.get_yaxis_transform(),
                color=LIGHT["ink"],
                bbox={"facecolor": LIGHT["card"], "linewidth": 0, "pad": 0.5},  # no line through the text
                parse_math=False,  # a name may have dollar signs
            )
        axes.set_ylim(-0.5, len(lines) - 0.3)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        format_values(axes.xaxis, measure == "success", "" if zero else " %", sign=zero)

    height = _MARGINS + _PER_LINE * len(lines)
    return Card(slug, title, inline_figure(slug, f"{what}, {title}", paint, height), what)
