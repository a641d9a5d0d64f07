"""The page of a contest: each method at its best learning rate, their differences with every test, and the tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments.contest import Contestant, Contrast, contestants, contrasts, counts_text, range_text, rate_text
from troll.files import json_text, write_atomically
from troll_lab.reports.figures import format_values, inline_figure, line_mark, line_style
from troll_lab.reports.outcome import outcome_section
from troll_lab.reports.page import Card, render
from troll_lab.runs.comparison import panels, read_comparison
from troll_lab.runs.comparison_tables import difference, estimate_json, estimate_text, left_out, method_json
from troll_lab.runs.recorded import Measure

_RATE_NOTE = (
    "Each method has the learning rate that suits it: a seed's is the one with the best mean over the other seeds."
)
_CHOSEN_NOTE = "Other settings were chosen for each method on separate seeds, see below."


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
        "unfinished": [run.name for run in comparison.runs if not run.finished],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "contest.json", json_text(content, indent=2) + "\n")
    page = folder / "contest.html"
    seeds = [f"{one.label}: {_seeds(one.left_out)}" for one in methods if one.left_out]
    write_atomically(page, contest_html(methods, found, choices, [*left_out(comparison), *seeds]))
    return page


def contest_html(
    methods: Sequence[Contestant],
    found: Sequence[Contrast[Contestant]],
    choices: Sequence[Mapping[str, Any]],
    unfinished: Sequence[str],
) -> str:
    """The page, from the methods, the contrasts between them, and a sentence about each unfinished run."""
    tuned = any(len(method.groups) > 1 for method in methods)
    notes = [*([_RATE_NOTE] if tuned else []), *([_CHOSEN_NOTE] if choices else [])]
    return render(
        "contest.html",
        folder=Path(__file__).parent,
        runs=sum(len(group.runs) for method in methods for group in method.groups.values()),
        methods=len(methods),
        outcome=outcome_section(methods, found, notes),
        contrasts=_contrast_table(found),
        rates=rate_figures(methods) if tuned else [],
        rate_table=_rate_table(methods),
        choices=_choice_table(choices),
        unfinished=unfinished,
    )


def _seeds(left_out: Sequence[int]) -> str:
    return f"seeds without a result at each learning rate are left out: {', '.join(map(str, left_out))}."


def _contrast_table(found: Sequence[Contrast[Contestant]]) -> pd.DataFrame:
    rows = []
    for one in found:
        success = one.first.measure == "success"
        row = {
            "": one.first.label,
            "minus": one.second.label,
            f"difference{', points' if success else ''}": difference(one.estimate, one.first.measure),
            "p (sign flips)": f"{one.p_value:.2g}",
            "p (Holm)": f"{one.corrected:.2g}",
        }
        if success:
            row["p (apart by 5 points or more)"] = "–" if one.equivalence is None else f"{one.equivalence:.2g}"
        rows.append(row)
    return pd.DataFrame(rows)


def _rate_table(methods: Sequence[Contestant]) -> pd.DataFrame:
    rows = [
        {
            "": method.label,
            f"{method.measure} when tuned{', %' if method.measure == 'success' else ''}": (
                "–" if method.final is None else estimate_text(method.final, method.measure)
            ),
            "learning rate (seeds)": counts_text(method.rates.values(), 2).replace(", ", ",\n") or "–",
            "within 90 % of the best": "–" if method.range is None else range_text(method.range, method.means),
        }
        for method in methods
        if len(method.means) > 1
    ]
    return pd.DataFrame(rows)


def _choice_table(choices: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The choices of a tuning, and their alternatives; only the chosen row of a method has its name."""
    rows = []
    for choice in choices:
        place = " ".join(f"{name}={value}" for name, value in choice["settings"].items())
        method = " ".join(filter(None, [str(choice["recipe"]), place, str(choice["surrogate"])]))
        for rank, entry in enumerate(choice["means"]):
            rows.append(
                {
                    "": method if rank == 0 else "",
                    "settings, the chosen ones first": " ".join(f"{k}={v}" for k, v in entry["values"].items()),
                    "mean over the tuning seeds": f"{entry['mean']:.3f}",
                }
            )
    return pd.DataFrame(rows)


def rate_figures(methods: Sequence[Contestant]) -> list[Card]:
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
            format_values(axes.yaxis, measure == "success")

        figure = inline_figure(slug, f"final held-out {measure} by learning rate, {title}", paint)
        cards.append(Card(slug, title, figure, legend={name: line_mark(i) for i, name in enumerate(members)}))
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
