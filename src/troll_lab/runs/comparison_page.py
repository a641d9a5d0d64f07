"""The page about several runs: final success, paired differences and curves over seeds in a single HTML file."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING
from urllib.parse import quote

from troll.files import json_text, write_atomically
from troll_lab.runs.charts import HELD_OUT
from troll_lab.runs.comparison import Comparison, Group, panels, read_comparison, row_label
from troll_lab.runs.comparison_tables import as_json, cell, difference, formatted, markdown, result_interval
from troll_lab.runs.dot_figures import outcome_section
from troll_lab.runs.page_frame import duration, figure_card, html_table, render
from troll_lab.runs.plot import (
    COLOURS,
    Scale,
    columns,
    drawing,
    line_mark,
    line_style,
    running_mean,
    set_scale,
    thin,
    window,
)
from troll_lab.runs.recorded import Measure, Run, metric_points
from troll_lab.values import yaml_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 100  # points of a line: a page has many lines
_TABLE_NOTE = (
    "Mean ± standard deviation over seeds; in brackets the number of seeds, and of planned ones if some runs have not "
    "finished; below it the 95 % interval of the mean, by Student's t over seeds"
)
_TABLE_NOTE_ENDS: dict[Measure, str] = {
    "success": ", or for a single seed by Wilson's formula over its problems.",
    "reward": ". Rewards of different tasks, or of different reward models, do not compare.",
}
_DIFFERENCE_NOTE = (
    "The difference of each seed: what a seed fixes, such as the initial model, cancels. In square brackets the 95 % "
    "interval of the mean by the paired t, in round ones the number of seeds. An interval that contains 0 is no "
    "evidence of a difference."
)
_PERCENT: dict[Measure, str] = {"success": ", %", "reward": ""}
_POINTS: dict[Measure, str] = {"success": ", percentage points", "reward": ""}


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
        "trust_region/kl_before_mean",
        "KL to the old policy",
        "from zero",
        "Nats, of the mean token before any projection.",
    ),
    _Metric(
        "trust_region/diagnostics/sequence_kl",
        "KL of whole sequences",
        "from zero",
        "Nats, from the policy that sampled a completion to the network, summed over its tokens.",
    ),
    _Metric("trust_region/projected_fraction", "Projected fraction", "percent", "Share of tokens outside the bound."),
    _Metric("clip_ratio/region_mean", "Clipped fraction", "percent", "Share of tokens whose gradient the clip cuts."),
    _Metric(
        "trust_region/tail_mass",
        "Tail mass",
        "from zero",
        "Probability of the old policy outside the tokens that are kept.",
    ),
)


@dataclass(frozen=True)
class _Band:
    """A metric of a group at the steps that its runs have in common: their mean, the smallest and the largest.

    `place` is the group's number in its row. It decides the colour, so that a group has the same one in every plot.
    """

    place: int
    steps: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def write_comparison(paths: Sequence[Path], folder: Path) -> Path:
    """Writes `comparison.json`, `comparison.md` and `comparison.html` about several runs.

    The same files give the same bytes. Unfinished runs are named and do not count.

    Args:
        paths: Run folders, and folders of `troll compare`.
        folder: The folder to write to; made if it does not exist.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If a path holds no runs.
        ValueError: If a file is malformed, or two runs do not differ.
        ImportError: If SciPy is not installed, or matplotlib; without matplotlib, the other two files are written.
    """
    comparison = read_comparison(paths)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "comparison.json", json_text(as_json(comparison), indent=2) + "\n")
    write_atomically(folder / "comparison.md", markdown(comparison))
    page = folder / "comparison.html"
    write_atomically(page, comparison_html(comparison, folder))
    return page


def comparison_html(comparison: Comparison, folder: Path) -> str:
    """The page; its links to the pages of single runs are relative to `folder`."""
    body = ['<p class="note">No run has finished yet.</p>']
    if comparison.groups:
        body = [outcome_section(comparison.groups, comparison.differences)]
        body += [section(comparison) for section in (_final_table, _difference_table, _curves, _effort_table)]
    body += [_unfinished(comparison.runs), _how_it_was_made(comparison, folder)]
    recipes = ", ".join(dict.fromkeys(escape(run.recipe) for run in comparison.finished))
    count, seeds = len(comparison.finished), len({run.seed for run in comparison.finished})
    return render(
        title="TROLL: comparison",
        heading=f"TROLL · comparison of {recipes}" if recipes else "TROLL · comparison",
        headline=f'<p class="headline">{count} run{"s" * (count != 1)}, {seeds} seed{"s" * (seeds != 1)}</p>',
        body="\n".join(filter(None, body)),
        footer="Written by <code>troll report</code>.",
    )


def _final_table(comparison: Comparison) -> str:
    measure = comparison.measure
    rows = [
        [escape(row_label(row))] + [_final(cells.get(name)) for name in comparison.surrogates]
        for row, cells in comparison.table.items()
    ]
    table = html_table(["", *map(escape, comparison.surrogates)], rows)
    note = f'<p class="note">{_TABLE_NOTE}{_TABLE_NOTE_ENDS[measure]}</p>'
    return f"<h2>Final held-out {measure}{_PERCENT[measure]}</h2>\n{table}\n{note}"


def _final(group: Group | None) -> str:
    estimate = group.final if group else None
    interval = result_interval(estimate, group.measure) if group and estimate else None
    ends = " to ".join(formatted(end, group.measure) for end in interval) if group and interval else ""
    return cell(group) + (f"<small>{ends}</small>" if ends else "")


def _difference_table(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    measure = comparison.measure
    rows = [
        [escape(found.first.label), escape(found.second.label), difference(found.estimate, measure)]
        for found in comparison.differences
    ]
    table = html_table(["", "minus", "difference"], rows)
    note = f'<p class="note">{_DIFFERENCE_NOTE}</p>'
    return f"<h2>Paired differences in {measure}{_POINTS[measure]}</h2>\n{table}\n{note}"


def _effort_table(comparison: Comparison) -> str:
    rows = []
    for group in comparison.groups:
        time, training = group.mean("seconds"), group.mean("training_seconds")
        entropy, before = group.mean("entropy_after"), group.mean(f"{comparison.measure}_before")
        rows.append(
            [
                escape(group.label),
                str(len(group.runs)),
                "–" if before is None else formatted(before, comparison.measure),
                "–" if entropy is None else f"{entropy:.3f}",
                "–" if time is None else duration(time),
                "–" if training is None else duration(training),
            ]
        )
    before_head = f"{comparison.measure} before{_PERCENT[comparison.measure]}"
    head = ["", "runs", before_head, "final entropy", "time since the last resume", "time in training steps"]
    return f"<h2>Runs</h2>\n{html_table(head, rows)}"


def _unfinished(runs: Sequence[Run]) -> str:
    items = [
        f"<li>{escape(run.name)} is left out: it is {escape(run.status)}.</li>" for run in runs if not run.finished
    ]
    return f'<ul class="missing">{"".join(items)}</ul>' if items else ""


def _how_it_was_made(comparison: Comparison, folder: Path) -> str:
    """The commands, the settings that the finished runs share, and links to the pages of single runs."""
    parts = [
        f"<details open><summary>Command</summary><pre>{escape(text)}</pre></details>" for text in comparison.commands
    ]
    if comparison.common_settings:
        settings = escape(yaml_text(comparison.common_settings))
        parts.append(f"<details><summary>Settings that all runs share</summary><pre>{settings}</pre></details>")
    reports = [(run.name, run.folder / "report.html") for run in comparison.runs]
    links = [
        f'<li><a href="{escape(quote(Path(os.path.relpath(report, folder)).as_posix()))}">{escape(name)}</a></li>'
        for name, report in reports
        if report.is_file()
    ]
    if links:
        parts.append(f"<details><summary>Pages of single runs</summary><ul>{''.join(links)}</ul></details>")
    return "\n".join(["<h2>How it was made</h2>", *parts]) if parts else ""


def _curves(comparison: Comparison) -> str:
    found = []
    for metric in _METRICS:
        plots = [
            (title, {label: band for label, place, group in lines if (band := _band(metric, group, place)) is not None})
            for title, lines in _plots(comparison)
        ]
        if plots := [(title, bands) for title, bands in plots if bands]:
            found.append((metric, plots))
    how = "Line: mean over seeds; band: smallest to largest seed."
    if all(len(plots) == 1 for _, plots in found):  # a plot for each metric: they share the width of the page
        cards = [_card(metric, 1, metric.title, bands, [bands], metric.caption) for metric, ((_, bands),) in found]
        return "\n".join(["<h2>Curves</h2>", '<div class="cards">', *cards, "</div>", f'<p class="note">{how}</p>'])
    parts = []
    for metric, plots in found:
        every = [bands for _, bands in plots]
        cards = [_card(metric, index, title, bands, every) for index, (title, bands) in enumerate(plots, start=1)]
        note = f"{metric.caption} {how[:-1]}; one scale in all plots."
        parts += [f"<h2>{metric.title}</h2>", '<div class="cards">', *cards, "</div>", f'<p class="note">{note}</p>']
    return "\n".join(parts)


def _plots(comparison: Comparison) -> list[tuple[str, list[tuple[str, int, Group]]]]:
    """The groups that share a plot, at most one for each colour, each with its label and its place."""
    numbered = [
        (title, [(label, place, group) for place, (label, group) in enumerate(lines.items())])
        for title, lines in panels(comparison.groups)
    ]
    return [
        (title, lines[start : start + len(COLOURS)])
        for title, lines in numbered
        for start in range(0, len(lines), len(COLOURS))
    ]


def _band(metric: _Metric, group: Group, place: int) -> _Band | None:
    lines = [metric_points(run.rows, metric.key) for run in group.runs]
    logged = [dict(points) for points in lines if points]
    common = sorted(set.intersection(*map(set, logged))) if logged else []
    if not common:
        return None
    lines = [[(step, values[step]) for step in common] for values in logged]
    if not metric.key.startswith("eval_"):
        # Thinned only now that they have the same steps: lines that began at different steps would share no point.
        lines = [thin(points, _MOST_POINTS) for points in lines]
        lines = [running_mean(points, window(len(points))) for points in lines]
    seeds = list(zip(*(columns(points)[1] for points in lines), strict=True))
    return _Band(place, columns(lines[0])[0], [*map(fmean, seeds)], [*map(min, seeds)], [*map(max, seeds)])


def _card(
    metric: _Metric,
    index: int,
    title: str,
    bands: Mapping[str, _Band],
    every: Sequence[Mapping[str, _Band]],
    caption: str | None = None,
) -> str:
    """A plot of some bands on the scales of all of them."""
    slug = f"{metric.title} {index}".lower().replace(" ", "-")
    ends = [value for panel in every for band in panel.values() for value in [*band.low, *band.high]]
    margin = 0.05 * ((max(ends) - min(ends)) or 1.0)
    bottom = min(ends) - margin if metric.scale == "linear" else 0.0
    last = max(band.steps[-1] for panel in every for band in panel.values())

    def paint(axes: Axes) -> None:
        for band in bands.values():
            style = line_style(band.place)
            axes.fill_between(band.steps, band.low, band.high, color=style["color"], alpha=0.15, linewidth=0)
            axes.plot(band.steps, band.mean, **style, marker="." if len(band.steps) <= 2 else "")
        set_scale(axes, metric.scale, [])
        axes.set_ylim(bottom, max(ends) + margin)

    plot = drawing(slug, escape(f"{metric.title}, {title}"), paint, last_step=max(1, last))
    legend = {escape(label): line_mark(band.place) for label, band in bands.items()}
    return figure_card(slug, escape(title), plot, legend, caption)
