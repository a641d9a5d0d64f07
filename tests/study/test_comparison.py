import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.study.test_report import Page
from troll.study.comparison import MANIFEST, Comparison, read_runs
from troll.study.comparison_page import write_comparison
from troll.study.comparison_tables import console_table, markdown

READ = {"troll": ["kl_bound"], "clip": ["epsilon"], "none": []}


def write_run(folder: Path, surrogate: str, seed: int, success: float | None, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"surrogate": surrogate, "seed": seed, "kl_bound": 0.05, "epsilon": 0.2, "output_dir": str(folder)}
    settings |= changes
    (folder / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    summary = {
        "status": "interrupted" if success is None else "finished",
        "recipe": "quickstart",
        "surrogate": surrogate,
        "surrogate_settings": {name: settings[name] for name in READ[surrogate]},
        "success_before": 0.3,
        "success_after": success,
        "steps": 16,
        "eval_size": 64,
        "entropy_after": 0.25,
        "seconds": 100 + seed,
        "training_seconds": 80,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "reward": 0.3 + step / 100 + seed / 10, "entropy": 0.5, "trust_region/kl_before_mean": 1e-3}
        for step in range(1, 17)
    ]
    rows.append({"step": 8, "eval_rewards/success/mean": 0.4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two bounds for TROLL, one clip, two seeds of each, and a run that was interrupted."""
    folder = tmp_path / "compare"
    for seed in (0, 1):
        write_run(folder / f"a-{seed}", "troll", seed, 0.60 + seed / 10, kl_bound=0.01)
        write_run(folder / f"b-{seed}", "troll", seed, 0.64 + seed / 10)
        write_run(folder / f"c-{seed}", "clip", seed, 0.58 + seed / 5)
    write_run(folder / "d", "none", 0, None)
    names = ["a-0", "b-0", "c-0", "a-1", "b-1", "c-1", "d", "not started"]
    (folder / MANIFEST).write_text(json.dumps({"runs": {name: {} for name in names}}))
    return folder


def test_runs_that_differ_in_their_seed_are_one_group(folder: Path) -> None:
    comparison = Comparison(read_runs([folder]))
    troll, clip = "quickstart kl_bound=", "quickstart clip"
    assert [group.label for group in comparison.groups] == [f"{troll}0.01 troll", f"{troll}0.05 troll", clip]
    assert [group.successes for group in comparison.groups][2] == {0: 0.58, 1: pytest.approx(0.78)}
    assert comparison.surrogates == ["troll", "clip"]
    assert [dict(row)["kl_bound"] for row in comparison.rows] == ["0.01", "0.05"]
    assert all(comparison.group(row, "clip") is comparison.groups[2] for row in comparison.rows), "it reads no kl_bound"


def test_differences_are_of_troll_and_each_rival_in_each_row(folder: Path) -> None:
    differences = Comparison(read_runs([folder])).differences
    assert [(found.first.label, found.second.label) for found in differences] == [
        ("quickstart kl_bound=0.01 troll", "quickstart clip"),
        ("quickstart kl_bound=0.05 troll", "quickstart clip"),
    ]
    assert [found.estimate.mean for found in differences] == [pytest.approx(-0.03), pytest.approx(0.01)]


def test_with_one_surrogate_the_rows_are_compared_to_the_first(folder: Path) -> None:
    comparison = Comparison(read_runs([folder / name for name in ("a-0", "a-1", "b-0", "b-1")]))
    (found,) = comparison.differences
    assert found.estimate.mean == pytest.approx(0.04)
    assert "kl_bound=0.05" in found.first.label


def test_a_setting_that_differs_between_the_surrogates_is_not_hidden(tmp_path: Path) -> None:
    fast = write_run(tmp_path / "fast", "troll", 0, 0.5, learning_rate=1e-3)
    slow = write_run(tmp_path / "slow", "clip", 0, 0.5, learning_rate=1e-5)
    comparison = Comparison(read_runs([fast, slow]))
    assert len(comparison.rows) == 2
    assert comparison.differences == []


def test_two_equal_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", "clip", 0, 0.5)
    with pytest.raises(ValueError, match="c-0 and again differ in nothing"):
        _ = Comparison(read_runs([folder, again])).groups


def test_tables(folder: Path) -> None:
    comparison = Comparison(read_runs([folder]))
    lines = markdown(comparison).splitlines()
    assert lines[2:5] == [
        "|  | troll | clip |",
        "|---|---|---|",
        "| quickstart kl_bound=0.01 | 65.0 ± 7.1 (2) | 68.0 ± 14.1 (2) |",
    ]
    assert lines[-2].startswith("| quickstart kl_bound=0.01 troll | quickstart clip | −3.0 [−66.5, +60.5] (2) |")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(console_table(comparison))
    assert "69.0 ± 7.1 (2)" in console.export_text()


def test_the_files_of_a_comparison(folder: Path) -> None:
    page = write_comparison([folder], folder)
    first = {path.name: path.read_bytes() for path in folder.glob("comparison.*")}
    assert sorted(first) == ["comparison.html", "comparison.json", "comparison.md"]
    assert write_comparison([folder], folder) == page
    assert {path.name: path.read_bytes() for path in folder.glob("comparison.*")} == first

    figures = json.loads(first["comparison.json"])
    assert figures["unfinished"] == ["d"]
    group = figures["groups"][2]
    assert (group["surrogate"], group["entropy"], group["seconds"]) == ("clip", 0.25, 100.5)
    assert group["success"]["mean"] == pytest.approx(0.68)
    assert group["success"]["interval_method"] == "t"


def test_the_page_is_self_contained_and_says_everything(folder: Path) -> None:
    page = Page(write_comparison([folder], folder))
    assert {reference[0] for reference in page.references} == {"#"}
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    plots = "".join(re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL))
    assert re.findall(r"(?:fill|stroke|color): *(#[0-9a-f]{3,6})", plots) == []
    assert set(re.findall(r"var\(--(\w+)\)", plots)) <= set(re.findall(r"--(\w+):", page.source))
    for text in ("6 runs, 2 seeds", "65.0 ± 7.1 (2)", "−3.0 [", "d is left out: it is interrupted", "0.250", "100 s"):
        assert text in page.text
    assert page.tags.count("svg") == 4 * 2, "success, reward, entropy and KL, of two bounds"
    assert "Projected fraction" not in page.text, "no run logged it"


def test_bands_reach_from_the_smallest_to_the_largest_seed(folder: Path) -> None:
    card = Page(write_comparison([folder], folder)).card("reward-1")
    assert card is not None
    line = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--first\); stroke-width: 1.6', card)[0]
    band = re.findall(r'<path id="[^"]*" d="([^"]*)"/>\s*</defs>\s*<g[^>]*>\s*<use [^>]*y="([^"]*)"', card)[0]
    middle = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", line)]
    edge = [float(y) + float(band[1]) for _, y in re.findall(r"[ML] (\S+) (\S+)", band[0])]
    # Rewards of the seeds are 0.1 apart, and each rises by 0.11 between the running mean's ends.
    assert max(edge) - max(middle) == pytest.approx(min(middle) - min(edge), rel=1e-3)
    assert max(edge) - max(middle) == pytest.approx(0.05 / 0.12 * (max(middle) - min(middle)), rel=0.1)


def test_one_seed_has_wilsons_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", "troll", 0, 0.5)
    page = Page(write_comparison([run, write_run(tmp_path / "two", "clip", 0, 0.75)], tmp_path / "out"))
    assert "50.0 (1)38.1 to 61.9" in page.text, "32 of 64 answers"


def test_before_any_run_has_finished(tmp_path: Path) -> None:
    page = Page(write_comparison([write_run(tmp_path / "run", "troll", 0, None)], tmp_path))
    assert "No run has finished yet" in page.text


def test_many_rows_share_the_colours(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(i), "troll", 0, 0.5, kl_bound=0.01 * (i + 1)) for i in range(8)]
    page = Page(write_comparison(runs, tmp_path))
    assert page.tags.count("svg") == 4 * 2
    card = page.card("reward-2")
    assert card is not None and card.count("<li>") == 2


def test_what_comes_from_the_runs_is_escaped(tmp_path: Path) -> None:
    attack = "</table><script>alert(1)</script>"
    runs = [write_run(tmp_path / str(i), "troll", 0, 0.5, task=f"'{attack}{i}'") for i in range(2)]
    page = Page(write_comparison(runs, tmp_path))
    assert "script" not in page.tags
    assert attack in page.text


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run folder"):
        read_runs([tmp_path])
    (tmp_path / MANIFEST).write_text('{"runs": {"a": {}}}')
    with pytest.raises(FileNotFoundError, match="has no runs yet"):
        read_runs([tmp_path])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml: not YAML"):
        read_runs([tmp_path / "bad"])
