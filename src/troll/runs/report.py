"""The page about one run: its held-out success, its curves and its settings in a single HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from troll.files import read_json, write_atomically
from troll.runs.curves import SHARE, curves_html, number
from troll.runs.page_frame import duration, percent, render
from troll.runs.recorded import read_metrics
from troll.runs.statistics import wilson_interval


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
    files = [run_folder / name for name in ("config.yaml", "summary.json", "metrics.jsonl")]
    if not any(path.is_file() for path in files):
        raise FileNotFoundError(
            f"{run_folder} is not a run folder: it has no config.yaml, summary.json or metrics.jsonl"
        )
    config, summary, metrics = files
    page = _page(
        config.read_text(encoding="utf-8") if config.is_file() else None,
        read_json(summary) if summary.is_file() else {},
        read_metrics(metrics) if metrics.is_file() else [],
        run_folder.resolve().name,
    )
    report = run_folder / "report.html"
    write_atomically(report, page)
    return report


def _page(config: str | None, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: str) -> str:
    name = str(summary.get("recipe") or folder)
    heading = f"TROLL · {escape(name)}"
    if (status := summary.get("status")) in ("interrupted", "failed"):
        heading += f'<span class="interrupted">{status}</span>'
    steps = sorted({row["step"] for row in rows})
    logged = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}." if steps else "No step was logged."
    curves = curves_html(rows, summary) if rows else '<p class="note">No step was logged, so there are no curves.</p>'
    return render(
        title=f"TROLL: {name}",
        heading=heading,
        headline=_headline(summary),
        body="\n".join([curves, "<h2>The run</h2>", _facts(summary), _config(config)]),
        footer=f"{logged} Written by <code>troll report</code>.",
    )


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = (number(summary.get(key), SHARE) for key in ("success_before", "success_after"))
    rollouts, seconds = number(summary.get("rollouts")), number(summary.get("seconds"))
    effort = [f"{rollouts:g} rollouts"] if rollouts is not None else []
    effort += [duration(seconds)] if seconds is not None else []
    outcome = f"in {', '.join(effort)}" if effort else ""
    if before is not None and after is not None:
        label, shown = "Held-out success", f"{percent(before)} → <b>{percent(after)}</b>"
        gain = f"{100 * (after - before):+.1f}".replace("-", "−")
        outcome = ", ".join(filter(None, [f"{gain} points", outcome]))
    elif after is not None:
        label, shown = "Held-out success after training", f"<b>{percent(after)}</b>"
    elif before is not None:
        label, shown = "Held-out success before training", percent(before)
    elif (rewards := [number(summary.get(f"reward_{when}")) for when in ("before", "after")]) != [None, None]:
        # The task cannot tell success from failure.
        shown_rewards = ["not measured" if reward is None else f"{reward:.3g}" for reward in rewards]
        label, shown = "Held-out reward", f"{shown_rewards[0]} → <b>{shown_rewards[1]}</b>"
    else:
        label, shown = "Held-out success", "not measured"
    parts = [f'<p class="headline"><span class="label">{label}</span> {shown}</p>']
    if outcome:
        parts.append(f'<p class="outcome">{outcome}</p>')
    size = number(summary.get("eval_size"), (1, math.inf))
    ends = [(name, share) for name, share in (("before", before), ("after", after)) if share is not None]
    if size is not None and ends:
        intervals = "; ".join(f"{name} {_interval(share, int(size))}" for name, share in ends)
        parts.append(f'<p class="note">95 % intervals from {size:g} answers to held-out problems: {intervals}.</p>')
    return "\n".join(parts)


def _interval(share: float, size: int) -> str:
    low, high = wilson_interval(share, size)
    return f"{100 * low:.1f}–{percent(high)}"


def _facts(summary: Mapping[str, Any]) -> str:
    labels = {
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
    facts = {label: str(summary[key]) for key, label in labels.items() if summary.get(key) is not None}
    if (seconds := number(summary.get("seconds"))) is not None:
        facts["Training time"] = duration(seconds)
    versions = summary.get("versions")
    if isinstance(versions, dict) and versions:
        facts["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not facts:
        return '<p class="note">The run left no summary.</p>'
    rows = "\n".join(f"<div><dt>{label}</dt><dd>{escape(value)}</dd></div>" for label, value in facts.items())
    return f'<div class="card"><dl class="facts">\n{rows}\n</dl></div>'


def _config(config: str | None) -> str:
    if config is None:
        return '<p class="note">The run left no config.yaml.</p>'
    return f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"
