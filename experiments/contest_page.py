"""The page of a contest: each method at its best learning rate, their differences with every test, and the tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.contest import Contestant, Contrast, contestants, contrasts, counts_text, range_text, rate_text
from troll.files import json_text, write_atomically
from troll_lab.runs.comparison import panels, read_comparison
from troll_lab.runs.comparison_tables import difference, estimate_json, estimate_text, method_json
from troll_lab.runs.dot_figures import format_axis, outcome_section
from troll_lab.runs.page_frame import figure_card, html_table, render
from troll_lab.runs.plot import drawing, line_mark, line_style
from troll_lab.runs.recorded import Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNIT: dict[Measure, str] = {"success": ", %", "reward": ""}
_POINTS: dict[Measure, str] = {"success": ", points", "reward": ""}
_RATE_NOTE = (
    "Each method has the learning rate that suits it: a seed's is the one with the best mean over the other seeds."
)
_CHOSEN_NOTE = "Other settings were chosen for each method on separate seeds, see below."
_CONTRAST_NOTE = (
    "Each method at its own best settings. The p-value by sign flips is the chance of a difference at least as large "
    "if the two were equally good; Holm's correction allows for all rows of this table. The last column is the p-value "
    "of two one-sided t tests: below 0.05, the two are equivalent within 5 points."
)
_TUNING_NOTE = "The settings were chosen by these means, on seeds that are used nowhere else on this page."
_RANGE_NOTE = (
    "Line: mean over seeds; band: smallest to largest seed. The range holds the learning rates at which a method keeps "
    "at least 90 % of its best mean, on straight lines between the rates that were run; ≤ and ≥: as far as they were."
)


def write_contest(paths: Sequence[Path], folder: Path, choices: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Writes `contest.json` and `contest.html` about runs that differ in method, learning rate and seed.

    Args:
        paths: Run folders, and folders of `troll compare`.
        folder: The folder to write to; made if it does not exist.
        choices: The choices of a tuning, from `Choice.as_json`.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If a path holds no runs.
        ValueError: If a file is malformed, or two runs do not differ.
    """
    comparison = read_comparison(paths)
    methods = contestants(comparison)
    found = contrasts(methods)
    content = {
        "metric": f"final held-out {comparison.measure}",
        "commands": list(comparison.commands),
        "tuning": list(choices),
        "methods": [_contestant_json(method) for method in methods],
        "contrasts": [_contrast_json(one) for one in found],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "contest.json", json_text(content, indent=2) + "\n")
    page = folder / "contest.html"
    write_atomically(page, contest_html(methods, found, choices))
    return page


def contest_html(
    methods: Sequence[Contestant], found: Sequence[Contrast[Contestant]], choices: Sequence[Mapping[str, Any]]
) -> str:
    """The page, from the methods and the contrasts between them."""
    tuned = any(len(method.groups) > 1 for method in methods)
    notes = [*([_RATE_NOTE] if tuned else []), *([_CHOSEN_NOTE] if choices else [])]
    parts = [outcome_section(methods, found, notes)]
    if found:
        parts += ["<h2>Tuned against tuned</h2>", _contrast_table(found), f'<p class="note">{_CONTRAST_NOTE}</p>']
    if tuned:
        parts += [
            "<h2>Learning rates</h2>",
            f'<div class="cards">{"".join([*rate_figures(methods), _rate_table(methods)])}</div>',
            f'<p class="note">{_RANGE_NOTE}</p>',
        ]
    if choices:
        parts += ["<h2>Tuning</h2>", _choice_table(choices), f'<p class="note">{_TUNING_NOTE}</p>']
    size = sum(len(group.runs) for method in methods for group in method.groups.values())
    return render(
        title="TROLL: contest",
        heading="TROLL · contest",
        headline=f'<p class="headline">{size} run{"s" * (size != 1)}, {len(methods)} methods</p>',
        body="\n".join(parts),
        footer="Written by <code>python -m experiments contest</code>.",
    )


def _contrast_table(found: Sequence[Contrast[Contestant]]) -> str:
    measure = found[0].first.measure
    head = [
        "",
        "minus",
        f"difference{_POINTS[measure]}",
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
            f"{measure} when tuned{_UNIT[measure]}",
            "learning rate (seeds)",
            "within 90 % of the best",
        ],
        rows,
    )


def _choice_table(choices: Sequence[Mapping[str, Any]]) -> str:
    """The choices of a tuning, and their alternatives."""
    rows = []
    for choice in choices:
        place = " ".join(f"{name}={value}" for name, value in choice["settings"].items())
        method = " ".join(filter(None, [str(choice["recipe"]), place, str(choice["surrogate"])]))
        for rank, entry in enumerate(choice["means"]):
            text = escape(" ".join(f"{name}={value}" for name, value in entry["values"].items()))
            text = f'<span class="best">{text}</span>' if rank == 0 else text
            rows.append([escape(method) if rank == 0 else "", text, f"{entry['mean']:.3f}"])
    return html_table(["", "settings, the chosen ones first", "mean over the tuning seeds"], rows)


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
            format_axis(axes.yaxis, measure)

        plot = drawing(slug, escape(f"final held-out {measure} by learning rate, {title}"), paint)
        legend = {escape(label): line_mark(place) for place, label in enumerate(members)}
        cards.append(figure_card(slug, escape(title), plot, legend))
    return cards


def _contestant_json(method: Contestant) -> dict[str, Any]:
    """A method at its learning rates."""
    return {
        **method_json(method),
        f"{method.measure}_by_seed": {str(seed): value for seed, value in method.finals.items()},
        "learning_rate_by_seed": {str(seed): rate for seed, rate in method.rates.items()},
        method.measure: None if method.final is None else estimate_json(method.final),
        "by_learning_rate": [
            {"learning_rate": rate, method.measure: mean}
            for rate, mean in method.means.items()
            if len(method.means) > 1
        ],
        "learning_rates_within_90_percent": method.range,
    }


def _contrast_json(found: Contrast[Contestant]) -> dict[str, Any]:
    measure = found.first.measure
    return {
        "first": method_json(found.first),
        "second": method_json(found.second),
        measure: estimate_json(found.estimate),
        "sign_flip_p_value": found.p_value,
        "holm_p_value": found.corrected,
        "equivalence_p_value": found.equivalence,
    }
