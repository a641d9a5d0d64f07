"""The curves of one run as cards of HTML with inline SVG.

Colours are the page's CSS variables, which is how the plots follow the reader's light or dark theme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[int, float]]  # (optimiser step, value), one per step, in order
Range = tuple[float, float]

_MOST_POINTS = 400  # a line of more points is no more readable, and the page would pass a megabyte
_FEWEST_TO_SMOOTH = 12
SHARE: Range = (0.0, 1.0)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

LIGHT = {"paper": "#f6f7f9", "card": "#ffffff", "ink": "#1b2430", "soft": "#5a6675", "rule": "#dde2e8"}
DARK = {"paper": "#11151b", "card": "#1a2028", "ink": "#e7ebf0", "soft": "#9ba7b5", "rule": "#313a46"}
LIGHT |= {"first": "#1d5fa9", "second": "#c2571b"}
DARK |= {"first": "#7cb5f2", "second": "#f2a065"}

# Everything a reader's own matplotlibrc could change is set back by the style "default", which comes first.
_PLOT_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": LIGHT["soft"],
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["soft"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
}


@dataclass(frozen=True)
class _Curve:
    section: str
    title: str
    unit: str
    scale: Literal["linear", "from zero", "percent", "log", "log with bound"]
    lines: Mapping[str, str]  # metric -> legend; held-out metrics start with "eval_"
    caption: str


#: Where TRL logs the mean of a task's `success`.
SUCCESS = "rewards/success/mean"
_HELD_OUT = f"eval_{SUCCESS}"
_TRUST = "trust_region/"
_CURVES = (
    _Curve(
        "Learning",
        "Success",
        "share of completions",
        "percent",
        {SUCCESS: "training batch", _HELD_OUT: "held out"},
        "How many sampled completions solve their problem, on the training batches and on held-out problems (points "
        "with 95 % intervals). Higher is better.",
    ),
    _Curve(
        "Learning",
        "Reward",
        "mean per completion",
        "linear",
        {"reward": "training batch", "eval_reward": "held out"},
        "What training maximises. If it rises while success does not, the reward is earned in some other way than by "
        "solving problems.",
    ),
    _Curve(
        "Trust region",
        "KL to the old policy, mean token",
        "nats, log scale",
        "log with bound",
        {_TRUST + "kl_before_mean": "before projection", _TRUST + "kl_after_mean": "after"},
        "How far a token's distribution is from the policy that sampled it: the network's own (before) and its "
        "projection, which the loss uses (after). The first update of a rollout, with almost 0, is below the axis.",
    ),
    _Curve(
        "Trust region",
        "KL to the old policy, largest token",
        "nats, log scale",
        "log with bound",
        {_TRUST + "kl_before_max": "before projection", _TRUST + "kl_after_max": "after"},
        "The same for the token that moved most. Before may cross the bound ε; after must stay on it or below it: that "
        "is the trust region.",
    ),
    _Curve(
        "Trust region",
        "Projected fraction",
        "share of tokens",
        "percent",
        {_TRUST + "projected_fraction": "projected"},
        "How many tokens had left the trust region and were projected back onto its boundary. At 0 % the bound does "
        "nothing; above 10 % over many steps, lower the learning rate.",
    ),
    _Curve(
        "Trust region",
        "Multiplier η",
        "mean of the projected tokens",
        "from zero",
        {_TRUST + "multiplier": "η"},
        "How hard the projection pulls a projected token towards the old policy: larger the further the "
        "network has left it.",
    ),
    _Curve(
        "Policy",
        "Entropy",
        "nats per token",
        "from zero",
        {"entropy": "entropy"},
        "How undecided the policy is about its next token. A slow fall is learning; a drop to almost 0 means it "
        "no longer explores.",
    ),
    _Curve(
        "Policy",
        "Completion length",
        "mean, in tokens",
        "from zero",
        {"completions/mean_length": "length"},
        "How long the sampled completions are. A climb or a collapse here often explains a surprise in the reward.",
    ),
    _Curve(
        "Policy",
        "Support size",
        "tokens kept per position",
        "from zero",
        {_TRUST + "support_size": "support"},
        "How many of the old policy's most likely tokens the projection works on. It shrinks as the policy gets more "
        "certain.",
    ),
    _Curve(
        "Policy",
        "Tail mass",
        "probability, log scale",
        "log",
        {_TRUST + "tail_mass": "tail"},
        "How much of the old policy's probability lies outside that support. The smaller it is, the closer the KL "
        "above is to the one over the whole vocabulary.",
    ),
)


def wilson_interval(success: float, size: int) -> Range:
    """The 95 % Wilson score interval of a binomial proportion.

    Args:
        success: the observed proportion, in [0, 1].
        size: the number of independent trials behind it, at least 1.

    Returns:
        The interval's lower and upper end, both in [0, 1].
    """
    z = 1.959963984540054  # the standard normal's 97.5 % quantile
    centre = success + z * z / (2 * size)
    spread = z * math.sqrt(success * (1 - success) / size + z * z / (4 * size * size))
    scale = 1 + z * z / size
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def number(value: object, within: Range = (-math.inf, math.inf)) -> float | None:
    """``value`` if it is a finite number in the closed interval ``within``, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value) if within[0] <= value <= within[1] else None


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    # A resumed run logs the steps after its checkpoint again: the later line is the one that led to the model.
    values = {row["step"]: value for row in rows if (value := number(row.get(key))) is not None}
    return sorted(values.items())


def _held_out_success(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Points:
    ends: dict[int, float] = {}
    before, after = (number(summary.get(key), SHARE) for key in ("success_before", "success_after"))
    steps = number(summary.get("success_after_step", summary.get("steps")), (0, math.inf))
    if before is not None:
        ends[0] = before
    if after is not None and steps is not None:
        ends[int(steps)] = after
    return sorted({**ends, **dict(_points(rows, _HELD_OUT))}.items())


def curves_html(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """The cards of every curve the run has data for, and a sentence for every one it has not.

    Args:
        rows: the lines of ``metrics.jsonl``, at least one.
        summary: the run's ``summary.json``; of it ``kl_bound``, ``eval_size``, ``steps`` and the successes are read.

    Returns:
        HTML to stand inside the page's body.
    """
    bound = number(summary.get("kl_bound"), (1e-300, math.inf))
    size = number(summary.get("eval_size"), (1, math.inf))
    last = max(1, int(number(summary.get("steps")) or 0), *(row["step"] for row in rows))
    parts = []
    for section in dict.fromkeys(curve.section for curve in _CURVES):
        cards, missing = [], []
        for curve in (curve for curve in _CURVES if curve.section == section):
            data = {key: _points(rows, key) for key in curve.lines}
            if _HELD_OUT in data:
                data[_HELD_OUT] = _held_out_success(rows, summary)
            if any(value > 0 or not curve.scale.startswith("log") for points in data.values() for _, value in points):
                cards.append(_card(curve, data, last, bound, None if size is None else int(size)))
            else:
                why = "it was never above zero" if any(data.values()) else "this run logged no value of it"
                missing.append(f"<li>{curve.title} is left out: {why}.</li>")
        parts.append(f"<h2>{section}</h2>")
        parts += ['<div class="cards">', *cards, "</div>"] if cards else []
        parts += ['<ul class="missing">', *missing, "</ul>"] if missing else []
    return "\n".join(parts)


def _card(curve: _Curve, data: Mapping[str, Points], last: int, bound: float | None, size: int | None) -> str:
    drawn = {key: label for key, label in curve.lines.items() if data[key]}
    bound = bound if curve.scale == "log with bound" else None
    caption = [curve.caption]
    if trained := [len(data[key]) for key in drawn if not key.startswith("eval_")]:
        caption += _smoothing_note(max(trained))
    caption += [f"Not logged: {label}." for key, label in curve.lines.items() if key not in drawn]
    legend = [f'<li><i class="{_mark(curve, key)}"></i>{label}</li>' for key, label in drawn.items()]
    if bound is not None:
        legend.append(f'<li><i class="bound"></i>bound ε = {bound:g}</li>')
    slug = re.sub(r"\W+", "-", curve.title.lower())
    parts = [f'<figure class="card" id="{slug}">', f'<h3>{curve.title} <span class="unit">{curve.unit}</span></h3>']
    if len(curve.lines) > 1:
        parts.append(f'<ul class="legend">{"".join(legend)}</ul>')
    parts += [_plot(curve, data, last, bound, size, slug), f"<figcaption>{' '.join(caption)}</figcaption>", "</figure>"]
    return "\n".join(parts)


def _mark(curve: _Curve, key: str) -> str:
    return "points" if key.startswith("eval_") else ("first", "second")[list(curve.lines).index(key)]


def _window(count: int) -> int:
    """Points in the running mean of a line of ``count`` points; 1 leaves a short line as it is."""
    return 1 if count < _FEWEST_TO_SMOOTH else max(5, count // 12) | 1


def _smoothing_note(count: int) -> list[str]:
    group = math.ceil(count / _MOST_POINTS)
    window = _window(math.ceil(count / group))
    if window == 1:
        return []
    faint = "logged values" if group == 1 else f"logged values, {group} to a point"
    return [f"Faint: {faint}; bold: running mean of {window} points."]


def _thin(points: Points, largest: bool) -> Points:
    group = max(1, math.ceil(len(points) / _MOST_POINTS))
    chunks = [points[start : start + group] for start in range(0, len(points), group)]
    # A mean would hide the one step at which a maximum crossed the bound.
    pick = max if largest else fmean
    return [(chunk[len(chunk) // 2][0], pick(value for _, value in chunk)) for chunk in chunks]


def _running_mean(points: Points, window: int) -> Points:
    values = [value for _, value in points]
    half = window // 2
    return [(step, fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(points)]


def _plot(
    curve: _Curve, data: Mapping[str, Points], last: int, bound: float | None, size: int | None, slug: str
) -> str:
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError('the report needs matplotlib: pip install "troll-rl[report]"') from error

    with style.context(["default", {**_PLOT_STYLE, "svg.hashsalt": slug}]):
        figure = Figure(figsize=(4.3, 2.45))  # small, so that its text is legible on a phone
        axes = figure.add_axes((0.14, 0.185, 0.815, 0.785))  # the same in every card, so that steps line up
        axes.set_xlim(0, last * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("optimiser step")
        for key, points in data.items():
            if key.startswith("eval_"):
                _draw_held_out(axes, points, size if key == _HELD_OUT else None)
            else:
                _draw_line(axes, _thin(points, key.endswith("_max")), LIGHT[_mark(curve, key)])
        _scale(axes, curve, [value for points in data.values() for _, value in points], bound)
        if bound is not None:
            axes.axhline(bound, color=LIGHT["ink"], linewidth=1, linestyle=(0, (4, 3)))
            end = axes.get_yaxis_transform()
            axes.annotate("ε", (1, bound), (4, 0), xycoords=end, textcoords="offset points", va="center", fontsize=10)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return _inline(svg.getvalue(), slug, curve.title)


def _draw_line(axes: Axes, points: Points, colour: str) -> None:
    window = _window(len(points))
    if window == 1:
        axes.plot(*_columns(points), color=colour, marker=".")
    else:
        axes.plot(*_columns(points), color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(*_columns(_running_mean(points, window)), color=colour)


def _draw_held_out(axes: Axes, points: Points, size: int | None) -> None:
    steps, values = _columns(points)
    spread = None
    if size is not None:
        ends = [wilson_interval(value, size) for value in values]
        # Rounding can put an end of the interval on the wrong side of 0 % or 100 %.
        spread = [[max(0.0, v - low) for v, (low, _) in zip(values, ends, strict=True)]]
        spread += [[max(0.0, high - v) for v, (_, high) in zip(values, ends, strict=True)]]
    colour = LIGHT["second"]
    axes.errorbar(steps, values, spread, fmt="o", color=colour, markersize=4, elinewidth=1, clip_on=False, zorder=3)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _scale(axes: Axes, curve: _Curve, values: Sequence[float], bound: float | None) -> None:
    if curve.scale.startswith("log"):
        seen = [value for value in values if value > 0] + ([] if bound is None else [bound])
        top = max(seen)
        # The first update of a rollout leaves rounding noise, decades below the values that matter.
        bottom = max(min(seen), median(seen) / 100)
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(10.0 ** math.floor(math.log10(bottom)), 10.0 ** math.ceil(math.log10(top)))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: "10" + f"{math.log10(value):.0f}".translate(_SUPERSCRIPT))
        return
    if curve.scale != "linear":
        axes.set_ylim(0, axes.dataLim.y1 * 1.05 or 1)
    percent = curve.scale == "percent"
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %" if percent else f"{value:g}".replace("-", "−"))


def _inline(svg: str, slug: str, title: str) -> str:
    """The plot as an element of the page: ids of its own, the page's colours, no reference to anything outside."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg {view_box[0]} role="img" aria-label="{title}">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{slug}-", svg)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg.strip()
