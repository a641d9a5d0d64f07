"""Runs as the study's tables and folders have them, and a page that is made from some."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments import figures, page, table
from experiments.collect import _recipe
from experiments.table import Result

DOCS = Path(__file__).parents[2] / "docs"
REGIME = "sparse-signal"
DRAWS = 64


def result(surrogate: str, rate: float, seed: int, success: float, **changes: Any) -> Result:
    """A run of four rollouts with as many right draws as its success says, the same ones for a seed and success."""
    right = np.random.default_rng(seed).permutation(DRAWS) < round(success * DRAWS)
    values: dict[str, Any] = {
        "regime": REGIME,
        "surrogate": surrogate,
        "learning_rate": rate,
        "settings": {"troll": (("kl_bound", "0.05"),), "clip": (("epsilon", "0.2"),)}.get(surrogate, ()),
        "seed": seed,
        "phase": "counted",
        "success_before": None,
        "success_after": float(right.mean()),
        "right_before": 0.875,
        "right_after": 0.75,
        "formatted_after": None,
        "eval_size": DRAWS,
        "token_kl": 1e-3,
        "sequence_kl": None,
        "completions": 16,
        "curve": (1, 4, 8, 9),
        "entropy": (0.75, 0.5),
        "questions": "",
        "verdicts": table.pack(right.tolist()),
        "commit": "0123456789",
        "machine": "CPU (x86_64, 1 threads)",
        "versions": "python 3.11 torch 2.13",
    }
    return Result(**values | changes)


def run_folder(folder: Path, surrogate: str = "troll", seed: int = 0, **changes: Any) -> Path:
    """A run of the protocol, cut down to two rollouts and four draws, as `troll train` leaves it."""
    folder.mkdir(parents=True)
    read: dict[str, Any] = {
        "troll": {"kl_bound": 0.05, "kl_bound_schedule_kwargs": None, "regression_weight": 1.0},
        "clip": {"epsilon": 0.2, "epsilon_high": None},
    }.get(surrogate, {})
    settings = {
        **{**_recipe(REGIME)[0], "surrogate": surrogate, "seed": seed, "learning_rate": 3e-4, "save_steps": 3},
        **{"output_dir": str(folder), "kl_bound": 0.05, "epsilon": 0.2},
    }
    settings |= read | changes.pop("settings", {})
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    summary = {
        **{"status": "finished", "recipe": REGIME, "surrogate": surrogate, "surrogate_settings": read},
        **{"success_before": None, "success_after": 0.5, "success_after_step": 16, "eval_size": 4},
        **{"rollouts": 2, "updates_per_rollout": 8, "commit": "0123456789", "machine": "CPU"},
        "versions": {"python": "3.11", "torch": "2.13"},
    }
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    success, kl, rate = "rewards/success/mean", "trust_region/kl_before_mean", "learning_rate"
    logs = [
        {"step": 8, success: 1 / 256, "rewards/right/mean": 0.875, "entropy": 0.123456, kl: 0.001, rate: 1.23456e-5},
        {"step": 16, success: 3 / 256, "entropy": 0.1, kl: 0.003, rate: 1e-4},
        {"step": 16, "eval_rewards/success/mean": 0.5, "eval_rewards/right/mean": 0.75},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logs))
    verdicts = {"step": 16, "question": [0, 1, 0, 3], "success": [1, 0, 1, 0]}
    (folder / "verdicts.json").write_text(json.dumps(verdicts))
    return folder


def fill(rows: dict[str, list[Result]], folder: Path, template: str) -> tuple[str, dict[str, figures.Drawing]]:
    """One page's text, and its figures."""
    pages = page.build(rows, folder, {"page": template})
    return pages.texts["page"], pages.figures
