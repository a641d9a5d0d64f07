"""The page about a run on movements, from the files that such a run leaves."""

import json
from pathlib import Path
from typing import Any

from tests.pages import Page, check_page
from troll_lab.episodic.config import CONFIG, METRICS, PATHS, SUMMARY, is_episodic
from troll_lab.reports.movements_page import write_report


def write_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"step": i, "environment_steps": 50_000 * i, "success": i / 20, "mean_kl": 1e-3, "entropy": 20 - i}
        for i in range(20)
    ]
    for row in rows[::5]:
        row |= {"eval_success": row["success"], "eval_success_interval": [row["success"] - 0.1, row["success"] + 0.1]}
    summary = {"environment": "reach", "method": "TCE", "status": "finished", "iterations": 19}
    summary |= {"environment_steps": 950_000, "eval_size": 128, "seconds": 700}
    summary |= {"success_before": 0.1, "success_after": 0.9, "success_interval": [0.85, 0.95]}
    summary |= {"return_before": -50.0, "return_after": -10.0}
    line = [[0.0, 0.0], [0.1, 0.2], [0.3, 0.3]]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / SUMMARY).write_text(json.dumps(summary | changes))
    (folder / PATHS).write_text(json.dumps({"before": [line], "after": [line], "target": [[0.3, 0.4]]}))
    (folder / CONFIG).write_text("iterations: 19\n")
    return folder


def test_the_page_shows_the_outcome_the_curves_and_the_paths(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert is_episodic(folder) and not is_episodic(tmp_path)
    page = Page(write_report(folder))
    check_page(page)
    for text in (
        "Held-out success 10.0 % → 90.0 % in 950000 environment steps, 12 min",
        "from 128 episodes: 85.0–95.0 %. Return -50.0 → -10.0.",
        "iterations: 19",
    ):
        assert text in page.text, text
    for slug in ("success", "kl-to-the-policy-before", "entropy", "ways-before", "ways-after"):
        assert page.card(slug) is not None, slug
    assert page.card("return") is None and page.card("explained-variance") is None, "nobody logged them"
    success = str(page.card("success"))
    assert "mean movements, held out" in success and "environment steps" in success and "800 k" in success


def test_one_held_out_episode_has_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    row = {"step": 20, "environment_steps": 1_000_000, "eval_return": -3.0, "eval_return_interval": None}
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert Page(write_report(folder)).card("return") is not None


def test_what_comes_from_the_run_is_escaped(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script>{{ 7 * 7 }}"
    folder = write_run(tmp_path / "run", environment=attack, method=attack, status=attack)
    (folder / CONFIG).write_text(attack)
    page = Page(write_report(folder))
    assert "script" not in page.tags
    assert page.text.count(attack) == 5, "title, heading twice, status, configuration"
