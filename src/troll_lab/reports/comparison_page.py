"""The page about several runs: final success, paired differences and curves over seeds in a single HTML file."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from matplotlib.axes import Axes

from troll_lab.reports.curves import smooth, thin
from troll_lab.reports.figures import COLOURS, Scale, inline_figure, line_mark, line_style, set_scale, set_steps
from troll_lab.reports.outcome import outcome_section, short_name
from troll_lab.reports.page import Card, Section, render
from troll_lab.runs.comparison import Comparison, Group, panels, row_label
from troll_lab.runs.comparison_tables import (
    DIFFERENCE_UNITS,
    ROUNDING,
    cell,
    difference,
    formatted,
    interval_of,
    is_constant,
    left_out,
    plain_difference,
    result_interval,
)
from troll_lab.runs.recorded import HELD_OUT, TRUST, metric, number
from troll_lab.runs.text import duration
from troll_lab.values import yaml_text

_MOST_POINTS = 100  # points of a line: a page has many lines
_MOST_NAMED = 3  # differences in a headline
_BANDS = (
    "Line: mean over seeds; long lines of training metrics are smoothed. Band: from the smallest to the largest seed; "
    f"beyond {_MOST_POINTS} logs, of means of neighbours"
)


@dataclass(frozen=True)
class _Metric:
    key: str
    title: str
    scale: Scale
    caption: str


_METRICS = (
    _Metric(HELD_OUT, "Held-out success", "percent", "Share of sampled answers to held-out problems that are right."),
    _Metric("eval_reward", "Held-out reward", "linear", "Mean per answer to the held-out prompts."),
    _Metric("reward", "Reward", "linear", "Mean per completion of the training batches."),
    _Metric("entropy", "Entropy", "from zero", "Nats per token. A drop to almost 0 means no more exploration."),
    _Metric(
        TRUST + "kl_before_mean",
        "KL to the old policy",
        "from zero",
        "Nats, of the mean token before any projection.",
    ),
    _Metric(
        TRUST + "diagnostics/sequence_kl",
        "KL of whole sequences",
        "from zero",
        "Nats, from the policy that sampled a completion to the network, summed over its tokens.",
    ),
    _Metric(TRUST + "projected_fraction", "Projected fraction", "percent", "Share of tokens outside the bound."),
    _Metric("clip_ratio/region_mean", "Clipped fraction", "percent", "Share of tokens whose gradient the clip cuts."),
    _Metric(
        TRUST + "tail_mass",
        "Tail mass",
        "from zero",
        "Probability of the old policy outside the tokens that are kept.",
    ),
)

#: Values of a metric by step, a column for each seed; by the name of the line, with its number in the panel, which
#: decides the colour, so that a group has the same one in every plot.
_Bands = Mapping[str, tuple[int, pd.DataFrame]]


def comparison_html(comparison: Comparison, folder: Path) -> str:
    """The page; its links to the pages of single runs are relative to `folder`."""
    reports = {run.name: run.folder / "report.html" for run in comparison.runs}
    links = {name: Path(os.path.relpath(path, folder)) for name, path in reports.items() if path.is_file()}
    return render(
        "comparison.html",
        comparison=comparison,
        headline=_headline(comparison),
        training=_training(comparison),
        recipes=list(dict.fromkeys(run.recipe for run in comparison.finished)),
        runs=len(comparison.finished),
        seeds=len({run.seed for run in comparison.finished}),
        outcome=outcome_section(comparison.groups, comparison.differences),
        row_label=row_label,
        cell=cell,
        ends=_ends,
        differences=_differences(comparison),
        curves=_curves(comparison),
        effort=_effort(comparison),
        unfinished=left_out(comparison),
        settings=yaml_text(comparison.common_settings) if comparison.common_settings else None,
        links={name: quote(path.as_posix()) for name, path in links.items()},
    )


def _headline(comparison: Comparison) -> tuple[str, str]:
    """The result in words, and a sentence about the differences that it leaves out; empty without differences."""
    measure, found = comparison.measure, comparison.differences
    if not found:
        return "", ""
    if all(one.estimate.size == 1 for one in found):
        return "No verdict from a single seed", ""
    first_panel, *others = panels(comparison.groups)
    members = {} if others else first_panel[1]  # with several panels, a name has to say which
    unclear, clear = [], []
    for one in found:
        interval = interval_of(one.estimate)
        first, second = short_name(one.first, members), short_name(one.second, members)
        if is_constant(one.estimate) and abs(one.estimate.mean) >= ROUNDING:
            ahead, behind = (first, second) if one.estimate.mean > 0 else (second, first)
            by = formatted(abs(one.estimate.mean), measure)
            clear.append(f"{ahead} is ahead of {behind} by {by}{DIFFERENCE_UNITS[measure]}, the same for every seed")
            continue
        if interval is None or interval[0] <= 0 <= interval[1]:
            unclear.append(f"{first} − {second} {plain_difference(one.estimate, measure)}{DIFFERENCE_UNITS[measure]}")
            continue
        ahead, behind, (low, high) = (first, second, interval) if interval[0] > 0 else (second, first, interval[::-1])
        by, least, most = (formatted(abs(value), measure) for value in (one.estimate.mean, low, high))
        clear.append(f"{ahead} is ahead of {behind} by {by}{DIFFERENCE_UNITS[measure]} [{least}, {most}]")
    rest = "; ".join(unclear[:_MOST_NAMED]) + ("; ..." if len(unclear) > _MOST_NAMED else "")
    if not clear:
        return "No clear difference", rest
    if len(clear) > _MOST_NAMED:
        return f"{len(clear)} of {len(found)} differences are clear", ""
    return "; ".join(clear), f"No clear difference: {rest}" if rest else ""


def _training(comparison: Comparison) -> str:
    """How long the runs trained."""
    times = [value for run in comparison.finished if (value := number(run.summary.get("training_seconds"))) is not None]
    if not times:
        return ""
    shortest, longest = duration(min(times)), duration(max(times))
    return f"{shortest} of training each" if shortest == longest else f"{shortest} to {longest} of training each"


def _ends(group: Group | None) -> str:
    """The interval of a group's result; empty if it has none."""
    estimate = group.final if group else None
    interval = result_interval(estimate, group.measure) if group and estimate else None
    return " to ".join(formatted(end, group.measure) for end in interval) if group and interval else ""


def _differences(comparison: Comparison) -> pd.DataFrame:
    rows = [
        {"": one.first.label, "minus": one.second.label, "difference": difference(one.estimate, comparison.measure)}
        for one in comparison.differences
    ]
    return pd.DataFrame(rows)


def _effort(comparison: Comparison) -> pd.DataFrame:
    measure = comparison.measure

    def mean(group: Group, key: str, text: Callable[[float], str]) -> str:
        value = group.mean(key)
        return "–" if value is None else text(value)

    rows = [
        {
            "": group.label,
            "runs": len(group.runs),
            f"{measure} before{', %' if measure == 'success' else ''}": mean(
                group, f"{measure}_before", lambda value: formatted(value, measure)
            ),
            "final entropy": mean(group, "entropy_after", "{:.3f}".format),
            "time in training": mean(group, "training_seconds", duration),
        }
        for group in comparison.groups
    ]
    return pd.DataFrame(rows)


def _curves(comparison: Comparison) -> list[Section]:
    """A section for each metric; a single one if every metric has a single plot."""
    found = []
    for one in _METRICS:
        plots = [(title, _bands(one.key, lines)) for title, lines in _plots(comparison)]
        if plots := [(title, bands) for title, bands in plots if bands]:
            found.append((one, plots))
    if all(len(plots) == 1 for _, plots in found):
        cards = [_card(one, 1, one.title, bands, [bands], one.caption) for one, ((_, bands),) in found]
        return [Section("Curves", cards, f"{_BANDS}.")]
    sections = []
    for one, plots in found:
        every = [bands for _, bands in plots]
        cards = [_card(one, index, title, bands, every) for index, (title, bands) in enumerate(plots, start=1)]
        sections.append(Section(one.title, cards, f"{one.caption} {_BANDS}; one scale in all plots."))
    return sections


def _plots(comparison: Comparison) -> list[tuple[str, dict[str, tuple[int, Group]]]]:
    """The groups that share a plot, at most one for each colour, each with its number in its panel."""
    plots = []
    for title, members in panels(comparison.groups):
        lines = [(name, (place, group)) for place, (name, group) in enumerate(members.items())]
        plots += [(title, dict(lines[i : i + len(COLOURS)])) for i in range(0, len(lines), len(COLOURS))]
    return plots


def _bands(key: str, lines: Mapping[str, tuple[int, Group]]) -> _Bands:
    bands = {name: (place, _band(key, group)) for name, (place, group) in lines.items()}
    return {name: (place, table) for name, (place, table) in bands.items() if len(table)}


def _band(key: str, group: Group) -> pd.DataFrame:
    """A metric of a group at the steps that its runs have in common, a column for each run that logged it."""
    logged = [curve for run in group.runs if len(curve := metric(run.rows, key))]
    if not logged:
        return pd.DataFrame()
    table = pd.concat(logged, axis=1, join="inner")
    # Thinned only now that they have the same steps: lines that began at different steps would share no point.
    return table if key.startswith("eval_") else thin(table, _MOST_POINTS)


def _card(metric: _Metric, index: int, title: str, bands: _Bands, every: Sequence[_Bands], caption: str = "") -> Card:
    """A plot of some bands on the scales of all of them."""
    slug = f"{metric.title} {index}".lower().replace(" ", "-")
    tables = [table for panel in every for _, table in panel.values()]
    low, high = min(table.min(axis=None) for table in tables), max(table.max(axis=None) for table in tables)
    margin = 0.05 * ((high - low) or 1.0)

    def paint(axes: Axes) -> None:
        for place, table in bands.values():
            style = line_style(place)
            ends = table.min(axis=1), table.max(axis=1)
            axes.fill_between(table.index, *ends, color=style["color"], alpha=0.15, linewidth=0)
            line = table.mean(axis=1)
            line = line if metric.key.startswith("eval_") else smooth(line)
            axes.plot(line, **style, marker="." if len(table) <= 2 else "")
        set_steps(axes, max(1, *(table.index[-1] for table in tables)))
        set_scale(axes, metric.scale, [])
        axes.set_ylim(low - margin if metric.scale == "linear" else 0.0, high + margin)

    legend = {name: line_mark(place) for name, (place, _) in bands.items()}
    return Card(slug, title, inline_figure(slug, f"{metric.title}, {title}", paint), legend=legend, caption=caption)
