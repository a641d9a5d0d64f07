"""The metrics that a run logs, and how the page about it draws and explains them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from troll_lab.evaluation.estimators import wilson_interval
from troll_lab.reports.curves import Chart, curve_card
from troll_lab.reports.figures import Scale
from troll_lab.reports.page import Section
from troll_lab.runs.recorded import HELD_OUT, SUCCESS, TRUST, Rows, eval_questions, metric, number

_WANTED = TRUST + "kl_target/wanted"
_DIAGNOSTICS = TRUST + "diagnostics/"

#: The charts of a single run by section, in the order of the page.
CHARTS: Mapping[str, Sequence[Chart]] = {
    "Learning": [
        Chart(
            "Success",
            "share of completions",
            "percent",
            {SUCCESS: "training batch", HELD_OUT: "held out"},
            "How many sampled completions solve their problem, on the training batches and on held-out problems "
            "(points with 95 % intervals). Higher is better.",
        ),
        Chart(
            "Reward",
            "mean per completion",
            "linear",
            {"reward": "training batch", "eval_reward": "held out"},
            "What training maximises. If it rises while success does not, the reward is earned in some other way than "
            "by solving problems.",
        ),
    ],
    "Trust region": [
        Chart(
            "KL to the old policy, mean token",
            "nats, log scale",
            "log",
            {TRUST + "kl_before_mean": "before projection", TRUST + "kl_after_mean": "after"},
            "How far a token's distribution is from the policy that sampled it: the network's own (before) and its "
            "projection, which the loss uses (after). At the first update of a rollout the KL is almost 0, which is "
            "below the axis.",
            with_bound=True,
        ),
        Chart(
            "KL to the old policy, largest token",
            "nats, log scale",
            "log",
            {TRUST + "kl_before_max": "before projection", TRUST + "kl_after_max": "after"},
            "The same for the token that moved most. Before may cross the bound ε; after must stay on it or below it: "
            "that is the trust region.",
            with_bound=True,
        ),
        Chart(
            "Projected fraction",
            "share of tokens",
            "percent",
            {TRUST + "projected_fraction": "projected"},
            "How many tokens had left the trust region and were projected back onto its boundary. At 0 % the bound "
            "does nothing; above 30 % over whole rollouts, raise the bound or lower the learning rate.",
        ),
        Chart(
            "Multiplier η",
            "mean of the projected tokens",
            "from zero",
            {TRUST + "multiplier": "η"},
            "How hard the projection pulls a projected token towards the old policy: larger the further the "
            "network has left it.",
        ),
        Chart(
            "Clipped fraction",
            "share of tokens",
            "percent",
            {"clip_ratio/region_mean": "clipped"},
            "How many tokens had a ratio outside the clip's range, on the side where the clip cuts the gradient.",
            shown="if logged",
        ),
    ],
    "Policy": [
        Chart(
            "Entropy",
            "nats per token",
            "from zero",
            {"entropy": "entropy"},
            "How undecided the policy is about its next token. A slow fall is learning; a drop to almost 0 means it "
            "no longer explores.",
        ),
        Chart(
            "Completion length",
            "mean, in tokens",
            "from zero",
            {"completions/mean_length": "length"},
            "How long the sampled completions are. A climb or a collapse here often explains a surprise in the reward.",
        ),
        Chart(
            "Support size",
            "tokens kept per position",
            "from zero",
            {TRUST + "support_size": "support"},
            "How many of the old policy's most likely tokens the projection works on. It shrinks as the policy gets "
            "more certain.",
        ),
        Chart(
            "Tail mass",
            "probability, log scale",
            "log",
            {TRUST + "tail_mass": "tail"},
            "How much of the old policy's probability lies outside that support. The smaller it is, the closer the KL "
            "above is to the one over the whole vocabulary.",
        ),
    ],
    "Critic": [
        Chart(
            "Value loss",
            "mean token",
            "from zero",
            {"critic/value_loss": "value loss"},
            "The squared error of the critic's values against the returns. It falls while the critic learns, and rises "
            "when the policy earns returns that the critic has not seen.",
            shown="if logged",
        ),
        Chart(
            "Explained variance",
            "of the returns",
            "linear",
            {"critic/explained_variance": "explained variance"},
            "The share of the variance of its targets that the critic predicted; a constant prediction has 0.",
            shown="if logged",
        ),
    ],
}

# Diagnostics that share a card: by the beginning of their names, the card's title, unit, scale and caption.
_FAMILIES: dict[str, tuple[str, str, Scale, str]] = {
    "sequence_kl": (
        "KL of whole sequences",
        "nats per sequence",
        "linear",
        "KL(old ‖ new) over whole completions, from the tokens' distributions; k1 and k3 estimate it from the sampled "
        "tokens only, with more noise.",
    ),
    "kept_tokens": (
        "Kept tokens",
        "per position",
        "from zero",
        "How many tokens of the old policy the support holds: mean and percentiles. Where the highest percentile is "
        "K, a larger K may be needed.",
    ),
    "covered_mass": (
        "Covered mass",
        "probability",
        "linear",
        "How much of the old policy's probability they cover. The closer to 1, the less the sparse KL misses.",
    ),
    "tail_gap": (
        "What the tail hides",
        "nats",
        "linear",
        "How much of a token's KL lies within the tail, measured on a sample, and the most it could be.",
    ),
    "ratio": (
        "Ratio of new to old probability",
        "of the sampled tokens, log scale",
        "log",
        "Percentiles over tokens: how far the updates of a rollout have moved the probabilities of the sampled tokens.",
    ),
    "clip_fraction": (
        "What a clip would have cut",
        "share of tokens",
        "percent",
        "The tokens whose gradient PPO's clip at 0.2 would have dropped.",
    ),
    "solver_evaluations": (
        "Solver evaluations",
        "per projected token",
        "from zero",
        "How often KL(τ) was evaluated to find the multiplier.",
    ),
    "conditioning": (
        "Conditioning of the multiplier",
        "log scale",
        "log",
        "The slope of log KL(τ) over log τ: 2 for small steps. Far below 2, a small change of the network makes a "
        "large change of the multiplier.",
    ),
}


def sections(rows: Rows, summary: Mapping[str, Any]) -> list[Section]:
    """The cards of all curves with data, and a sentence for each chart that should have data and has none."""
    bound = number(summary.get("kl_bound"), (1e-300, math.inf))
    last = max(1, int(number(summary.get("steps")) or 0), *(row["step"] for row in rows))
    size = eval_questions(summary)
    held_out = metric(rows, HELD_OUT)
    intervals = {HELD_OUT: {step: wilson_interval(share, size) for step, share in held_out.items()} if size else {}}
    # The charts of a trust region are not missing in a run without one.
    without_region = summary.get("surrogate", "troll") != "troll"
    names = dict.fromkeys(name for row in rows for name in row)
    more = {
        "KL target": target_charts(names),
        "Evaluation": evaluation_charts(names),
        "Diagnostics": diagnostic_charts(names),
    }
    found = []
    for title, charts in {**CHARTS, **more}.items():
        cards, missing = [], []
        for chart in charts:
            data = {key: metric(rows, key) for key in chart.lines}
            if any((curve > 0).any() or (chart.scale != "log" and len(curve)) for curve in data.values()):
                shown_bound = bound if chart.with_bound else None
                cards.append(curve_card(chart, data, last, intervals, shown_bound))
            elif chart.shown == "always" and not (without_region and all(key.startswith(TRUST) for key in data)):
                logged = any(map(len, data.values()))
                why = "it was never above zero" if logged else "this run logged no value of it"
                missing.append(f"{chart.title} is left out: {why}.")
        if cards or missing:
            found.append(Section(title, cards, missing=missing))
    return found


def diagnostic_charts(names: Iterable[str]) -> list[Chart]:
    """The charts of the metrics below `trust_region/diagnostics/` among `names`: families first."""
    left = [name.removeprefix(_DIAGNOSTICS) for name in dict.fromkeys(names) if name.startswith(_DIAGNOSTICS)]
    charts = []
    for family, (title, unit, scale, caption) in _FAMILIES.items():
        members = [name for name in left if name == family or name.startswith(f"{family}_")]
        left = [name for name in left if name not in members]
        charts.append(_diagnostic(title, unit, scale, members, caption))
    charts += [_diagnostic(_words(name).capitalize(), "", "linear", [name], "") for name in left]
    return [chart for chart in charts if chart.lines]


def target_charts(names: Collection[str]) -> list[Chart]:
    """The charts of a run whose learning rate follows a KL target, which other runs lack."""
    if _WANTED not in names:
        return []
    return [
        Chart(
            "KL measured and wanted",
            "nats, log scale",
            "log",
            {TRUST + "kl_target/measured": "measured", _WANTED: "wanted"},
            "How far the updates of a rollout have moved the policy, in the mean of their completions, and how far "
            "`kl_target` wants them to.",
            shown="if logged",
        ),
        Chart(
            "Learning rate",
            "log scale",
            "log",
            {"learning_rate": "learning rate"},
            "The rate that was used. The target sets it so that the two lines meet, and the schedule multiplies it.",
            shown="if logged",
        ),
    ]


def evaluation_charts(names: Iterable[str]) -> list[Chart]:
    """The charts of other metrics of evaluations than success: several completions of a problem, and other tasks."""
    captions = {
        "pass": "How likely it is that at least one of {} completions solves a held-out problem.",
        "maj": "How often the answer that most of {} completions give is right.",
    }
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for name in dict.fromkeys(names):
        if found := re.fullmatch(r"eval_(?:(.+)_)?(pass|maj)@(\d+)", name):
            task, measure, count = found.groups()
            if task or count != "1":  # the task's own pass@1 is its success
                lines.setdefault((measure, count), {})[name] = task or "the task trained on"
    return [
        Chart(
            f"{measure}@{count}",
            "share of problems",
            "percent",
            members,
            captions[measure].format(count),
            shown="if logged",
        )
        for (measure, count), members in lines.items()
    ]


def _diagnostic(title: str, unit: str, scale: Scale, names: Sequence[str], caption: str) -> Chart:
    lines = {_DIAGNOSTICS + name: _words(name) for name in names}
    return Chart(title, unit, scale, lines, caption, shown="if logged")


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", " ")
