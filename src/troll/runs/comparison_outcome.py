"""The first part of a comparison's page: the winner, by how much, and the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from troll.evaluation.estimators import Interval
from troll.runs.comparison import Comparison, Measure, panels
from troll.runs.comparison_tables import (
    difference,
    estimate_text,
    figure,
    interval_of,
    plain_difference,
    result_interval,
)
from troll.runs.contest import Contestant, Contrast, contestants, contrasts, counts_text, range_text, rate_text
from troll.runs.page_frame import figure_card, html_table
from troll.runs.plot import LIGHT, drawing, line_mark, line_style
from troll.runs.statistics import seed_differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_PER_LINE, _MARGINS = 0.42, 0.75  # inches for each method, and for the axis with its labels
_UNIT: dict[Measure, str] = {"success": " %", "reward": ""}
_POINTS: dict[Measure, str] = {"success": " points", "reward": ""}
_DOT_NOTE = (
    "Large dot: mean over seeds; bar: its 95 % interval; small dots: single seeds. A difference whose bar crosses 0 is "
    "no evidence."
)
_RATE_NOTE = (
    "Each method has the learning rate that suits it: a seed's is the one with the best mean over the other seeds."
)
_CHOSEN_NOTE = "Other settings were chosen for each method on separate seeds, see below."
_CONTRAST_NOTE = (
    "Each method at its own best settings. The p-value by sign flips is the chance of a difference at least as large "
    "if the two were equally good; Holm's correction allows for all rows of this table. The last column is the p-value "
    "of two one-sided t tests: below 0.05, the two are equivalent within 5 points."
)
_RANGE_NOTE = (
    "Line: mean over seeds; band: smallest to largest seed. The range holds the learning rates at which a method keeps "
    "at least 90 % of its best mean, on straight lines between the rates that were run; ≤ and ≥: as far as they were."
)


def outcome(comparison: Comparison) -> str:
    """The figures of the outcome; if learning rates differ, also the methods at their best ones."""
    methods = contestants(comparison)
    found = contrasts(methods)
    cards = outcome_figures(methods, found)
    if not cards:
        return ""
    tuned = any(len(method.groups) > 1 for method in methods)
    notes = [_DOT_NOTE, *([_RATE_NOTE] if tuned else []), *([_CHOSEN_NOTE] if comparison.choices else [])]
    parts = [
        "<h2>Outcome</h2>",
        f'<div class="cards">{"".join(cards)}</div>',
        f'<p class="note">{" ".join(notes)}</p>',
    ]
    if not tuned and not comparison.choices:
        return "\n".join(parts)
    if found:
        parts += ["<h2>Tuned against tuned</h2>", _contrast_table(found), f'<p class="note">{_CONTRAST_NOTE}</p>']
    if tuned:
        parts += [
            "<h2>Learning rates</h2>",
            f'<div class="cards">{"".join([*rate_figures(methods), _rate_table(methods)])}</div>',
            f'<p class="note">{_RANGE_NOTE}</p>',
        ]
    return "\n".join(parts)


def _contrast_table(found: Sequence[Contrast[Contestant]]) -> str:
    measure = found[0].first.measure
    head = [
        "",
        "minus",
        f"difference,{_POINTS[measure]}" if measure == "success" else "difference",
        "p (sign flips)",
        "p (Holm)",
    ]
    head += ["p (apart by 5 points or more)"] if measure == "success" else []
    rows = [
        [
            *(escape(one.first.label), escape(one.second.label), difference(one.estimate, measure)),
            *(f"{one.p_value:.2g}", f"{one.corrected:.2g}"),
            *(["–" if one.equivalence is None else f"{one.equivalence:.2g}"] if measure == "success" else []),
        ]
        for one in found
    ]
    return html_table(head, rows)


def _rate_table(methods: Sequence[Contestant]) -> str:
    rows = [
        [
            escape(method.label),
            "–" if method.final is None else estimate_text(method.final, method.measure),
            counts_text(method.rates.values(), 2).replace(", ", ",<br>") or "–",
            "–" if method.range is None else range_text(method.range, method.means),
        ]
        for method in methods
        if len(method.means) > 1
    ]
    measure = methods[0].measure
    return html_table(
        [
            "",
            f"{measure} when tuned,{_UNIT[measure]}" if measure == "success" else f"{measure} when tuned",
            "learning rate (seeds)",
            "within 90 % of the best",
        ],
        rows,
    )


def outcome_figures(methods: Sequence[Contestant], differences: Sequence[Contrast[Contestant]]) -> list[str]:
    """Cards with the results of the methods, each followed by the paired differences."""
    cards = []
    for number, (title, members) in enumerate(panels(methods), start=1):
        measure = next(iter(members.values())).measure
        lines = [
            _Line(
                f"{label}   {figure(final.mean, measure)}{_UNIT[measure]}",
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
        of_panel = [found for found in differences if found.first in members.values()]
        lines = [
            _Line(
                f"{_short(found.first, members)} − {_short(found.second, members)}   "
                f"{plain_difference(found.estimate, measure)}{_POINTS[measure]}",
                list(members.values()).index(found.second) if found.second in members.values() else place,
                found.estimate.mean,
                interval_of(found.estimate),
                seed_differences(found.first.finals, found.second.finals),
            )
            for place, found in enumerate(of_panel)
        ]
        if lines:
            cards.append(_dots(f"lead-{number}", title, "paired difference, seed by seed", lines, measure, zero=True))
    return cards


def rate_figures(methods: Sequence[Contestant]) -> list[str]:
    """Cards with the final result over the learning rate, with a line for each method with several rates."""
    cards = []
    for number, (title, members) in enumerate(panels([one for one in methods if len(one.means) > 1]), start=1):
        slug = f"learning-rates-{number}"
        measure = next(iter(members.values())).measure

        def paint(axes: Axes, members: Mapping[str, Contestant] = members, measure: Measure = measure) -> None:
            for place, method in enumerate(members.values()):
                style, rates = line_style(place), list(method.means)
                finals = [list(method.groups[rate].finals.values()) for rate in rates]
                low, high = [*map(min, finals)], [*map(max, finals)]
                axes.fill_between(rates, low, high, color=style["color"], alpha=0.1, linewidth=0)
                axes.plot(rates, list(method.means.values()), **style, marker=".")
            axes.set_xscale("log")
            ticks = sorted({rate for method in members.values() for rate in method.means})
            axes.set_xticks(ticks, [rate_text(rate, 2) for rate in ticks])
            axes.minorticks_off()
            axes.set_xlabel("learning rate")
            _format(axes.yaxis, measure)

        plot = drawing(slug, escape(f"final held-out {measure} by learning rate, {title}"), paint)
        legend = {escape(label): line_mark(place) for place, label in enumerate(members)}
        cards.append(figure_card(slug, escape(title), plot, legend))
    return cards


def _short(method: Contestant, members: Mapping[str, Contestant]) -> str:
    return next((label for label, member in members.items() if member is method), method.label)


@dataclass(frozen=True)
class _Line:
    """A line of a dot plot: its text, the place of its colour, the mean with its interval, and the single seeds."""

    text: str
    place: int
    mean: float
    interval: Interval | None
    seeds: Sequence[float]


def _dots(slug: str, title: str, what: str, lines: Sequence[_Line], measure: Measure, zero: bool = False) -> str:
    def paint(axes: Axes) -> None:
        if zero:
            axes.axvline(0, color=LIGHT["ink"], linewidth=1)
        for line, y in zip(lines, range(len(lines) - 1, -1, -1), strict=True):
            colour = line_style(line.place)["color"]
            axes.plot(line.seeds, [y] * len(line.seeds), ".", color=colour, alpha=0.35, markersize=4)
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
        axes.set_ylim(-0.45, len(lines) - 0.3)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        _format(axes.xaxis, measure, sign=zero)

    plot = drawing(slug, escape(f"{what}, {title}"), paint, _MARGINS + _PER_LINE * len(lines))
    return figure_card(slug, f'{escape(title)} <span class="unit">{escape(what)}</span>', plot)


def _format(axis: Axis, measure: Measure, sign: bool = False) -> None:
    def label(value: float, _: object) -> str:
        value = round(100 * value if measure == "success" else value, 9)
        return f"{value:{'+' if sign and value else ''}g}".replace("-", "−") + ("" if sign else _UNIT[measure])

    axis.set_major_formatter(label)
