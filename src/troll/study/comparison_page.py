"""The page about several runs: final success, paired differences and curves over seeds in a single HTML file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from troll.files import write_atomically
from troll.study.comparison import Comparison, Group, Run, read_runs, row_label
from troll.study.comparison_tables import as_json, cell, markdown, points
from troll.study.curves import held_out_success, metric_points
from troll.study.metrics import HELD_OUT
from troll.study.page import duration, percent, render
from troll.study.plot import COLOURS, LIGHT, Points, Scale, columns, running_mean, set_scale, svg, thin, window
from troll.study.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 100  # of a line: a page has many of them
_TABLE_NOTE = (
    "Mean ± standard deviation over seeds, in brackets their number; below it the 95 % interval of the mean, by "
    "Student's t over seeds, or for a single seed by Wilson's formula over its answers."
)
_DIFFERENCE_NOTE = (
    "The difference of each seed, in percentage points: what a seed fixes, such as the initial model, cancels. In "
    "square brackets the 95 % interval of the mean by the paired t, in round ones the number of seeds. An interval "
    "that contains 0 is no evidence of a difference."
)


@dataclass(frozen=True)
class _Metric:
    key: str
    title: str
    scale: Scale
    caption: str


_METRICS = (
    _Metric(HELD_OUT, "Held-out success", "percent", "Share of sampled answers to held-out problems that are right."),
    _Metric("reward", "Reward", "linear", "Mean per completion of the training batches."),
    _Metric("entropy", "Entropy", "from zero", "Nats per token. A drop to almost 0 means no more exploration."),
    _Metric(
        "trust_region/kl_before_mean",
        "KL to the old policy",
        "from zero",
        "Nats, of the mean token before any projection.",
    ),
    _Metric("trust_region/projected_fraction", "Projected fraction", "percent", "Share of tokens outside the bound."),
)


@dataclass(frozen=True)
class _Band:
    """A metric of a group at common steps: mean, smallest and largest of its runs."""

    mean: Points
    low: Points
    high: Points


def write_comparison(paths: Sequence[Path], folder: Path) -> Path:
    """Writes ``comparison.json``, ``comparison.md`` and ``comparison.html`` about several runs.

    The same files give the same bytes. Unfinished runs are named and do not count.

    Args:
        paths: Run folders, and folders of ``troll compare``.
        folder: Where to; made if need be.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: A path holds no runs.
        ValueError: A file is malformed, or two runs differ in nothing.
        ImportError: matplotlib is not installed; the other two files are written.
    """
    comparison = Comparison(read_runs(paths))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "comparison.json", json.dumps(as_json(comparison), indent=2) + "\n")
    write_atomically(folder / "comparison.md", markdown(comparison))
    page = folder / "comparison.html"
    write_atomically(page, comparison_html(comparison))
    return page


def comparison_html(comparison: Comparison) -> str:
    """The page."""
    finished = sum(run.finished for run in comparison.runs)
    seeds = {run.seed for group in comparison.groups for run in group.runs}
    sections = (_success_table, _difference_table, _curves, _effort_table)
    body = [section(comparison) for section in sections if comparison.groups]
    body = body or ['<p class="note">No run has finished yet.</p>']
    recipes = ", ".join(dict.fromkeys(escape(run.recipe) for run in comparison.runs))
    runs = f"{finished} run{'s' * (finished != 1)}"
    return render(
        title="TROLL: comparison",
        heading=f"TROLL · comparison of {recipes}",
        headline=f'<p class="headline">{runs}, {len(seeds)} seed{"s" * (len(seeds) != 1)}</p>',
        body="\n".join(filter(None, [*body, _unfinished(comparison.runs)])),
        footer="Written by <code>troll report</code>.",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f'<th scope="col">{text}</th>' for text in head) + "</tr>"]
    body = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{text}</td>" for text in rest) + "</tr>"
        for first, *rest in rows
    ]
    parts = ['<div class="card wide"><table>', "<thead>", *lines, "</thead>", "<tbody>", *body, "</tbody>"]
    return "\n".join([*parts, "</table></div>"])


def _success_table(comparison: Comparison) -> str:
    rows = [
        [escape(row_label(row))] + [_success(comparison.group(row, name)) for name in comparison.surrogates]
        for row in comparison.rows
    ]
    table = _table(["", *map(escape, comparison.surrogates)], rows)
    return f'<h2>Final held-out success, %</h2>\n{table}\n<p class="note">{_TABLE_NOTE}</p>'


def _success(group: Group | None) -> str:
    estimate = group.success if group else None
    if estimate is None or estimate.interval is None:
        return cell(estimate)
    return f"{cell(estimate)}<small>{_interval(estimate)}</small>"


def _interval(estimate: Estimate) -> str:
    assert estimate.interval is not None
    low, high = estimate.interval
    return f"{100 * low:.1f} to {100 * high:.1f}".replace("-", "−")


def _difference_table(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    rows = [
        [escape(found.first.label), escape(found.second.label), points(found.estimate)]
        for found in comparison.differences
    ]
    table = _table(["", "minus", "difference"], rows)
    return f'<h2>Paired differences in success</h2>\n{table}\n<p class="note">{_DIFFERENCE_NOTE}</p>'


def _effort_table(comparison: Comparison) -> str:
    rows = []
    for group in comparison.groups:
        time, training = group.mean("seconds"), group.mean("training_seconds")
        entropy, before = group.mean("entropy_after"), group.mean("success_before")
        rows.append(
            [
                escape(group.label),
                str(len(group.runs)),
                "–" if before is None else percent(before),
                "–" if entropy is None else f"{entropy:.3f}",
                "–" if time is None else duration(time),
                "–" if training is None else duration(training),
            ]
        )
    head = ["", "runs", "success before", "final entropy", "time per run", "of it training steps"]
    return f"<h2>Runs</h2>\n{_table(head, rows)}"


def _unfinished(runs: Sequence[Run]) -> str:
    items = [
        f"<li>{escape(run.name)} is left out: it is {escape(str(run.summary.get('status', 'not finished')))}.</li>"
        for run in runs
        if not run.finished
    ]
    return f'<ul class="missing">{"".join(items)}</ul>' if items else ""


def _curves(comparison: Comparison) -> str:
    parts = []
    for metric in _METRICS:
        panels = [
            (title, {label: band for label, group in lines.items() if (band := _band(metric, group)) is not None})
            for title, lines in _panels(comparison)
        ]
        panels = [(title, bands) for title, bands in panels if bands]
        if not panels:
            continue
        ends = [value for _, bands in panels for band in bands.values() for _, value in [*band.low, *band.high]]
        margin = 0.05 * ((max(ends) - min(ends)) or 1.0)
        limits = min(ends) - margin, max(ends) + margin
        last = max(step for _, bands in panels for band in bands.values() for step, _ in band.mean)
        cards = [
            _card(f"{metric.title} {index}", title, bands, metric, max(1, last), limits)
            for index, (title, bands) in enumerate(panels, start=1)
        ]
        note = f"{metric.caption} Line: mean over seeds; band: smallest to largest seed; one scale in all plots."
        parts += [f"<h2>{metric.title}</h2>", '<div class="cards">', *cards, "</div>", f'<p class="note">{note}</p>']
    return "\n".join(parts)


def _panels(comparison: Comparison) -> list[tuple[str, Mapping[str, Group]]]:
    """What shares a plot: the surrogates of a row, or with a single surrogate the rows; no more than colours."""
    panels = []
    if len(comparison.surrogates) > 1:
        for row in comparison.rows:
            cells = {name: comparison.group(row, name) for name in comparison.surrogates}
            panels.append((row_label(row), {name: group for name, group in cells.items() if group is not None}))
    else:
        panels.append((comparison.surrogates[0], {row_label(group.row): group for group in comparison.groups}))
    return [
        (title, dict(list(lines.items())[start : start + len(COLOURS)]))
        for title, lines in panels
        for start in range(0, len(lines), len(COLOURS))
    ]


def _band(metric: _Metric, group: Group) -> _Band | None:
    lines = [dict(_line(metric, run)) for run in group.runs]
    lines = [line for line in lines if line]
    steps = sorted(set.intersection(*(set(line) for line in lines))) if lines else []

    def over_seeds(pick: Callable[[list[float]], float]) -> Points:
        return [(step, pick([line[step] for line in lines])) for step in steps]

    return _Band(over_seeds(fmean), over_seeds(min), over_seeds(max)) if steps else None


def _line(metric: _Metric, run: Run) -> Points:
    if metric.key == HELD_OUT:
        return held_out_success(run.rows, run.summary)
    logged = thin(metric_points(run.rows, metric.key), _MOST_POINTS)
    return running_mean(logged, window(len(logged)))


def _card(
    name: str,
    title: str,
    bands: Mapping[str, _Band],
    metric: _Metric,
    last: int,
    limits: tuple[float, float],
) -> str:
    slug = name.lower().replace(" ", "-")
    colours = dict(zip(bands, COLOURS, strict=False))

    def paint(axes: Axes) -> None:
        for label, band in bands.items():
            colour = LIGHT[colours[label]]
            steps, means = columns(band.mean)
            axes.fill_between(steps, columns(band.low)[1], columns(band.high)[1], color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, means, color=colour, marker="." if len(steps) <= 2 else "")
        set_scale(axes, metric.scale, [])
        axes.set_ylim(*limits)

    legend = "".join(f'<li><i class="{colours[label]}"></i>{escape(label)}</li>' for label in bands)
    parts = [f'<figure class="card" id="{slug}">', f"<h3>{escape(title)}</h3>", f'<ul class="legend">{legend}</ul>']
    return "\n".join([*parts, svg(slug, escape(f"{metric.title}, {title}"), last, paint), "</figure>"])
