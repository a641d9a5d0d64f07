"""The page about one run: its held-out success, its curves and its settings in a single HTML file.

The page needs nothing but itself: styles and plots are inline, so it opens offline, by mail and on a phone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from troll.study.curves import DARK, LIGHT, SHARE, curves_html, number, wilson_interval

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { color-scheme: light dark; $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: clamp(1.25rem, 4vw, 3rem) clamp(0.9rem, 3vw, 2rem) 3rem; }
h1, h2, h3, p, dl, dd, ul { margin: 0; }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 0.9rem; }
h3 { font-size: 1.05rem; }
header { padding-bottom: 1.75rem; border-bottom: 1px solid var(--rule); }
.headline { margin-top: 0.4rem; font-size: clamp(1.9rem, 5.5vw, 3rem); font-weight: 650; line-height: 1.15;
  letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.headline b { color: var(--first); font-weight: inherit; }
.label { display: block; font-size: 1.05rem; font-weight: 500; letter-spacing: 0; line-height: 1.6; }
.outcome { margin-top: 0.35rem; font-size: 1.1rem; }
.note { margin-top: 0.35rem; color: var(--soft); max-width: 46rem; }
.interrupted { display: inline-block; margin-left: 0.5rem; padding: 0 0.55rem; border: 1px solid var(--second);
  border-radius: 1rem; color: var(--second); font-size: 0.85rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.card, details { background: var(--card); border: 1px solid var(--rule); border-radius: 0.6rem; min-width: 0; }
.card { padding: 1rem 1.1rem 1.1rem; margin: 0; }
.unit { font-weight: 400; color: var(--soft); font-size: 0.9rem; white-space: nowrap; }
figcaption { font-size: 0.92rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.1rem; font-size: 0.88rem; padding: 0; list-style: none; }
.legend i { display: inline-block; vertical-align: middle; width: 1.2rem; margin-right: 0.4rem;
  border-top: 3px solid var(--soft); }
.legend .first { border-color: var(--first); }
.legend .second { border-color: var(--second); }
.legend .points { width: 0.6rem; height: 0.6rem; border: 0; border-radius: 50%; background: var(--second); }
.legend .bound { border-top: 2px dashed var(--ink); }
svg { display: block; width: 100%; height: auto; overflow: visible; margin: 0.35rem 0 0.5rem; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif !important; }
.missing { margin-top: 1rem; padding-left: 1.1rem; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr)); gap: 0.7rem 1.5rem; }
.facts div:last-child { grid-column: 1 / -1; }
.facts dt { font-size: 0.85rem; color: var(--soft); }
.facts dd { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
details { margin-top: 1rem; }
summary { padding: 0.75rem 1.1rem; cursor: pointer; font-weight: 600; }
pre { margin: 0; padding: 0 1.1rem 1.1rem; overflow-x: auto;
  font: 0.82rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 2.5rem; font-size: 0.85rem; color: var(--soft); }
</style>
</head>
<body>
<main>
<header>
<h1>$heading</h1>
$headline
</header>
$curves
<h2>The run</h2>
$facts
$config
<footer>$footer</footer>
</main>
</body>
</html>
""")


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` of a run, finished or not, from the files of its folder.

    Reads ``config.yaml`` (shown as it is), ``summary.json`` and ``metrics.jsonl``; each of them, and each of their
    keys, may be missing. The same files give the same bytes, and an earlier report is replaced in one step.

    Args:
        run_folder: the folder that ``troll train`` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: the folder holds none of the three files.
        ValueError: a file is malformed. A last metrics line cut short by a crash is not: it is left out.
        ImportError: matplotlib is not installed.
    """
    files = [run_folder / name for name in ("config.yaml", "summary.json", "metrics.jsonl")]
    if not any(path.is_file() for path in files):
        raise FileNotFoundError(
            f"{run_folder} is not a run folder: it has no config.yaml, summary.json or metrics.jsonl"
        )
    config, summary, metrics = files
    page = _page(
        config.read_text(encoding="utf-8") if config.is_file() else None,
        _read_summary(summary) if summary.is_file() else {},
        _read_metrics(metrics) if metrics.is_file() else [],
        run_folder.resolve().name,
    )
    report = run_folder / "report.html"
    write_atomically(report, page)
    return report


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(summary).__name__}")
    return summary


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if line_number == len(lines) and not line.endswith(b"\n"):
                break  # the run was killed while it wrote this line
            raise ValueError(f"{path}, line {line_number}: not JSON ({error})") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f'{path}, line {line_number}: expected an object with an integer "step"')
        rows.append(row)
    return rows


def _page(config: str | None, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: str) -> str:
    name = str(summary.get("recipe") or folder)
    heading = f"TROLL · {escape(name)}"
    if (status := summary.get("status")) in ("interrupted", "failed"):
        heading += f'<span class="interrupted">{status}</span>'
    steps = sorted({row["step"] for row in rows})
    logged = f"{len(steps)} logged steps, {steps[0]} to {steps[-1]}." if steps else "No step was logged."
    return _PAGE.substitute(
        title=escape(f"TROLL: {name}"),
        light=_css_variables(LIGHT),
        dark=_css_variables(DARK),
        heading=heading,
        headline=_headline(summary),
        curves=curves_html(rows, summary)
        if rows
        else '<p class="note">No step was logged, so there are no curves.</p>',
        facts=_facts(summary),
        config=_config(config),
        footer=f"{logged} Written by <code>troll report</code>.",
    )


def _css_variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 600:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = (number(summary.get(key), SHARE) for key in ("success_before", "success_after"))
    rollouts, seconds = number(summary.get("rollouts")), number(summary.get("seconds"))
    effort = [f"{rollouts:g} rollouts"] if rollouts is not None else []
    effort += [_duration(seconds)] if seconds is not None else []
    outcome = f"in {', '.join(effort)}" if effort else ""
    if before is not None and after is not None:
        label, shown = "Held-out success", f"{_percent(before)} → <b>{_percent(after)}</b>"
        gain = f"{100 * (after - before):+.1f}".replace("-", "−")
        outcome = ", ".join(filter(None, [f"{gain} points", outcome]))
    elif after is not None:
        label, shown = "Held-out success after training", f"<b>{_percent(after)}</b>"
    elif before is not None:
        label, shown = "Held-out success before training", _percent(before)
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
    return f"{100 * low:.1f}–{_percent(high)}"


def _facts(summary: Mapping[str, Any]) -> str:
    labels = {
        "status": "Status",
        "recipe": "Recipe",
        "task": "Task",
        "model": "Model",
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
        facts["Training time"] = _duration(seconds)
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
