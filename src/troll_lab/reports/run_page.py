"""The page about one run: its held-out success, its curves and its settings in a single HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from troll.files import write_atomically
from troll_lab.evaluation.estimators import wilson_interval
from troll_lab.reports.charts import sections
from troll_lab.reports.page import render
from troll_lab.runs.recorded import (
    ANSWERS,
    SHARE,
    Rows,
    eval_questions,
    number,
    read_metrics,
    read_summary,
)
from troll_lab.runs.text import duration, percent, problems

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
    "seed": "Seed",
    "machine": "Machine",
}


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` of a run, finished or not, from the files of its folder.

    It reads `config.yaml` (which the page shows unchanged), `summary.json`, `metrics.jsonl` and `answers.jsonl`. Each
    file and each key may be missing. The same files give the same bytes, and an earlier report is replaced atomically.

    Args:
        run_folder: The folder that `troll train` wrote.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: If the folder holds none of the three files.
        ValueError: If a file is malformed. A last line of metrics that a crash cut short is left out instead.
    """
    config, metrics = run_folder / "config.yaml", run_folder / "metrics.jsonl"
    if not any(path.is_file() for path in (config, run_folder / "summary.json", metrics)):
        raise FileNotFoundError(
            f"{run_folder} is not a run folder: it has no config.yaml, summary.json or metrics.jsonl"
        )
    summary = read_summary(run_folder)
    rows = read_metrics(metrics) if metrics.is_file() else []
    answers = run_folder / ANSWERS
    page = render(
        "run.html",
        name=str(summary.get("recipe") or run_folder.resolve().name),
        status=summary.get("status"),
        task=str(summary.get("task") or ""),
        about=str(summary.get("task_about") or ""),
        **_headline(summary),
        answers=_answers(read_metrics(answers)) if answers.is_file() else None,
        steps=sorted({row["step"] for row in rows}),
        sections=sections(rows, summary) if rows else [],
        facts=_facts(summary),
        configuration=config.read_text(encoding="utf-8") if config.is_file() else None,
    )
    report = run_folder / "report.html"
    write_atomically(report, page)
    return report


def _headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the template's headline: successes or rewards, the effort, and intervals of the successes."""
    success = {when: number(summary.get(f"success_{when}"), SHARE) for when in ("before", "after")}
    rewards = [number(summary.get(f"reward_{when}")) for when in ("before", "after")]
    shown_rewards = ["not measured" if reward is None else f"{reward:.3g}" for reward in rewards]
    rollouts, seconds = number(summary.get("rollouts")), number(summary.get("training_seconds"))
    effort = [f"{rollouts:g} rollouts"] if rollouts is not None else []
    effort += [duration(seconds)] if seconds is not None else []
    outcome = [f"in {', '.join(effort)} of training"] if effort else []
    if success["before"] is not None and success["after"] is not None:
        outcome.insert(0, f"{100 * (success['after'] - success['before']):+.1f} points".replace("-", "−"))
    size = eval_questions(summary)
    ends = [(when, share) for when, share in success.items() if share is not None]
    return {
        "success": success,
        "rewards": [] if rewards == [None, None] else shown_rewards,
        "outcome": outcome,
        "problems": "" if size is None else problems(int(number(summary.get("eval_size")) or size), size),
        "intervals": [] if size is None else [f"{when} {_interval(share, size)}" for when, share in ends],
    }


def _interval(share: float, size: int) -> str:
    """An interval that is not broken into lines."""
    low, high = wilson_interval(share, size)
    return f"{100 * low:.1f} to {percent(high)}".replace(" ", "\N{NO-BREAK SPACE}")


def _answers(evaluations: Rows) -> pd.DataFrame | None:
    """A problem a row, with its answers before and after training; None if the run has no two evaluations of it."""
    if len(evaluations) < 2 or evaluations[0]["step"] != 0:
        return None
    before, after = ({one["question"]: one for one in evaluations[place]["answers"]} for place in (0, -1))
    rows = [
        {"problem": question, "before": _marked(before[question]), "after": _marked(after[question])}
        for question in before
        if question in after
    ]
    return pd.DataFrame(rows) if rows else None


def _marked(answer: Mapping[str, Any]) -> str:
    """An answer with a mark that says whether it is right, if somebody judged it."""
    mark = {1.0: " ✓", 0.0: " ✗"}.get(answer["success"], "")
    return answer["text"].strip() + mark


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    facts = {label: str(summary[key]) for key, label in _FACTS.items() if summary.get(key) is not None}
    if (seconds := number(summary.get("training_seconds"))) is not None:
        facts["Time in training"] = duration(seconds)
    versions = summary.get("versions")
    if isinstance(versions, dict) and versions:
        facts["Versions"] = ", ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in versions.items())
    return facts
