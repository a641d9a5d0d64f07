"""The page about one run: its held-out success, its curves and its settings in a single HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from troll.files import write_atomically
from troll.runs.curves import curves_html
from troll.runs.page_frame import duration, percent, render
from troll.runs.recorded import SHARE, eval_size, number, read_metrics, read_summary
from troll.runs.statistics import wilson_interval

_FACTS = {
    "status": "Status",
    "recipe": "Recipe",
    "task": "Task",
    "model": "Model",
    "surrogate": "Surrogate",
    "advantage_estimator": "Advantage estimator",
    "kl_bound": "KL bound ε",
    "steps": "Optimiser steps",
    "rollouts": "Rollouts",
    "updates_per_rollout": "Updates per rollout",
    "eval_size": "Held-out problems",
    "seed": "Seed",
    "machine": "Machine",
}


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` of a run, finished or not, from the files of its folder.

    It reads `config.yaml` (which the page shows unchanged), `summary.json` and `metrics.jsonl`. Each file and each key
    may be missing. The same files give the same bytes, and an earlier report is replaced atomically.

    Args:
        run_folder: The folder that `troll train` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If the folder holds none of the three files.
        ValueError: If a file is malformed. A last line of metrics that a crash cut short is left out instead.
        ImportError: If matplotlib is not installed.
    """
    config, metrics = run_folder / "config.yaml", run_folder / "metrics.jsonl"
    if not any(path.is_file() for path in (config, run_folder / "summary.json", metrics)):
        raise FileNotFoundError(
            f"{run_folder} is not a run folder: it has no config.yaml, summary.json or metrics.jsonl"
        )
    summary = read_summary(run_folder)
    rows = read_metrics(metrics) if metrics.is_file() else []
    name = str(summary.get("recipe") or run_folder.resolve().name)
    heading = f"TROLL · {escape(name)}"
    if (status := summary.get("status")) in ("interrupted", "failed"):
        heading += f'<span class="interrupted">{status}</span>'
    steps = sorted({row["step"] for row in rows})
    logged = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}." if steps else "No step was logged."
    curves = curves_html(rows, summary) if rows else '<p class="note">No step was logged, so there are no curves.</p>'
    page = render(
        title=f"TROLL: {name}",
        heading=heading,
        headline=_headline(summary),
        body="\n".join([curves, "<h2>The run</h2>", _facts(summary), _configuration(config)]),
        footer=f"{logged} Written by <code>troll report</code>.",
    )
    report = run_folder / "report.html"
    write_atomically(report, page)
    return report


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = (number(summary.get(key), SHARE) for key in ("success_before", "success_after"))
    rollouts, seconds = number(summary.get("rollouts")), number(summary.get("seconds"))
    effort = [f"{rollouts:g} rollouts"] if rollouts is not None else []
    effort += [duration(seconds)] if seconds is not None else []
    outcome = [f"in {', '.join(effort)}"] if effort else []
    label = "Held-out success"
    if before is not None and after is not None:
        shown = f"{percent(before)} → <b>{percent(after)}</b>"
        outcome.insert(0, f"{100 * (after - before):+.1f} points".replace("-", "−"))
    elif after is not None:
        label, shown = "Held-out success after training", f"<b>{percent(after)}</b>"
    elif before is not None:
        label, shown = "Held-out success before training", percent(before)
    elif (rewards := [number(summary.get(f"reward_{when}")) for when in ("before", "after")]) != [None, None]:
        # The task cannot tell success from failure.
        first, last = ("not measured" if reward is None else f"{reward:.3g}" for reward in rewards)
        label, shown = "Held-out reward", f"{first} → <b>{last}</b>"
    else:
        shown = "not measured"
    parts = [f'<p class="headline"><span class="label">{label}</span> {shown}</p>']
    if outcome:
        parts.append(f'<p class="outcome">{", ".join(outcome)}</p>')
    size = eval_size(summary)
    ends = [(when, share) for when, share in (("before", before), ("after", after)) if share is not None]
    if size is not None and ends:
        intervals = "; ".join(f"{when} {_interval(share, size)}" for when, share in ends)
        parts.append(f'<p class="note">95 % intervals from {size:g} answers to held-out problems: {intervals}.</p>')
    return "\n".join(parts)


def _interval(share: float, size: int) -> str:
    low, high = wilson_interval(share, size)
    return f"{100 * low:.1f}–{percent(high)}"


def _facts(summary: Mapping[str, Any]) -> str:
    facts = {label: str(summary[key]) for key, label in _FACTS.items() if summary.get(key) is not None}
    if (seconds := number(summary.get("seconds"))) is not None:
        facts["Training time"] = duration(seconds)
    versions = summary.get("versions")
    if isinstance(versions, dict) and versions:
        facts["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not facts:
        return '<p class="note">The run left no summary.</p>'
    rows = "\n".join(f"<div><dt>{label}</dt><dd>{escape(value)}</dd></div>" for label, value in facts.items())
    return f'<div class="card"><dl class="facts">\n{rows}\n</dl></div>'


def _configuration(path: Path) -> str:
    if not path.is_file():
        return '<p class="note">The run left no config.yaml.</p>'
    text = escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>Configuration</summary><pre>{text}</pre></details>"
