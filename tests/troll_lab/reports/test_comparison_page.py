"""The page about several runs."""

import json
import re
from pathlib import Path

import pytest

from tests.pages import Page, check_page
from tests.troll_lab.runs.test_comparison import folder as folder
from tests.troll_lab.runs.test_comparison import write_folder, write_run
from troll_lab.runs.comparison_files import write_comparison
from troll_lab.runs.recorded import MANIFEST


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about the same runs."""
    folder = write_folder(tmp_path_factory.mktemp("written") / "compare")
    return write_comparison([folder], folder)


def test_the_page_says_how_it_was_made(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"command": "troll compare quickstart --seeds 2 <&"}))
    (folder / "c-0" / "report.html").write_text("")
    page = Page(write_comparison([folder], folder))
    assert "troll compare quickstart --seeds 2 <&" in page.text
    assert [reference for reference in page.references if reference[0] != "#"] == ["c-0/report.html"]
    assert "epsilon: 0.2" in page.text and "kl_bound: 0.05" not in page.text


def test_diagnostics_are_drawn_where_somebody_logged_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "troll", 0, 0.5)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (4, 8):
            row = {"trust_region/diagnostics/sequence_kl": 0.1, "trust_region/tail_mass": 0.2}
            file.write(json.dumps({"step": step} | row) + "\n")
    page = Page(write_comparison([run], tmp_path))
    assert page.card("kl-of-whole-sequences-1") and page.card("tail-mass-1")
    assert page.card("clipped-fraction-1") is None


def test_a_method_has_one_colour_in_all_plots(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, 0, 0.5) for name in ("clip", "troll")]
    rows = [{"step": step, "reward": 0.5, "trust_region/kl_before_mean": 1e-3} for step in range(1, 17)]
    for run, keys in zip(runs, ({"step", "reward"}, set(rows[0])), strict=True):
        lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in rows]
        (run / "metrics.jsonl").write_text("".join(lines))
    page = Page(write_comparison(runs, tmp_path))
    assert 'class="first solid"></i>clip' in str(page.card("reward-1"))
    for card in ("reward-1", "kl-to-the-old-policy-1"):
        assert 'class="second dashed"></i>troll' in str(page.card(card)), card
        assert "stroke: var(--second)" in str(page.card(card)), card


def test_lines_of_runs_that_logged_other_steps_meet(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), "troll", seed, 0.5) for seed in (0, 1)]
    for start, run in enumerate(runs):  # thinned apart, to every fifth step, they would have none in common
        rows = [{"step": step, "reward": 0.5} for step in range(1 + start, 501)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Page(write_comparison(runs, tmp_path)).card("reward-1") is not None


def test_the_files_of_a_comparison(written: Path) -> None:
    folder = written.parent
    first = {path.name: path.read_bytes() for path in folder.glob("comparison.*")}
    assert sorted(first) == ["comparison.html", "comparison.json", "comparison.md"]
    write_comparison([folder], folder)
    assert {path.name: path.read_bytes() for path in folder.glob("comparison.*")} == first

    figures = json.loads(first["comparison.json"])
    assert figures["unfinished"] == ["d", "not started"]
    group = figures["groups"][2]
    assert (group["surrogate"], group["entropy"], group["seconds"]) == ("clip", 0.25, 100.5)
    assert group["success"]["mean"] == pytest.approx(0.68)
    assert group["success"]["interval_method"] == "t" and group["success"]["interval"][1] > 1


def test_the_page_is_self_contained_and_says_everything(written: Path) -> None:
    page = Page(written)
    check_page(page)
    texts = ("6 runs, 2 seeds", "65.0 ± 7.1 (2)", "−3.0 [", "d is left out: it is interrupted", "0.250")
    for text in (*texts, "80 s of training each"):
        assert text in page.text
    assert page.tags.count("svg") == 4 * 2 + 2 * 2, "success, reward, entropy, KL, outcome and lead, of two bounds"
    assert "Projected fraction" not in page.text, "no run logged it"
    outcome, lead = str(page.card("outcome-1")), str(page.card("lead-1"))
    assert "troll   65.0 %" in outcome and "clip   68.0 %" in outcome
    assert "troll − clip   −3.0 [−66.5, +60.5] points" in lead
    assert page.source.index('id="outcome-1"') < page.source.index("<table>")
    # Intervals of shares.
    assert "68.0 ± 14.1 (2)0.0 to 100.0" in page.text
    assert "100 %" in outcome and "150 %" not in outcome


@pytest.mark.parametrize(
    ("clip", "headline"),
    [
        ([0.5, 0.5, 0.51], "troll is ahead of clip by 29.7 points [28.2, 31.1]"),
        ([0.9, 0.91, 0.9], "clip is ahead of troll by 10.3 points [8.9, 11.8]"),
        ([0.7, 0.81, 0.9], "No clear difference troll − clip −0.3 [−25.2, +24.5] points"),
        ([0.5, 0.5, 0.5], "troll is ahead of clip by 30.0 points, the same for every seed"),
        ([0.8, 0.8, 0.8], "No clear difference troll − clip 0.0 points"),
        ([0.5], "No verdict from a single seed"),
    ],
)
def test_the_headline_is_the_result(tmp_path: Path, clip: list[float], headline: str) -> None:
    runs = [write_run(tmp_path / f"troll-{seed}", "troll", seed, 0.8) for seed in range(len(clip))]
    runs += [write_run(tmp_path / f"clip-{seed}", "clip", seed, success) for seed, success in enumerate(clip)]
    assert f"quickstart {headline} " in Page(write_comparison(runs, tmp_path)).text


def test_a_headline_of_several_differences_names_the_clear_ones(tmp_path: Path) -> None:
    finals = {"troll": (0.8, 0.81, 0.82, 0.86), "clip": (0.5, 0.51, 0.52, 0.55), "none": (0.8, 0.81, 0.82, 0.8)}
    runs = [
        write_run(tmp_path / f"{name}-{seed}", name, seed, success)
        for name, successes in finals.items()
        for seed, success in enumerate(successes)
    ]
    text = Page(write_comparison(runs, tmp_path)).text
    assert "quickstart troll is ahead of clip by 30.2 points [29.5, 31.0]" in text
    assert "No clear difference: troll − none" in text


def test_single_seeds_are_circles_next_to_the_bar(written: Path) -> None:
    marks = re.findall(r'y="(\S+)" style="(fill[^;]*); stroke: var\(--first\)"', str(Page(written).card("outcome-1")))
    assert [style for _, style in marks] == ["fill-opacity: 0", "fill-opacity: 0", "fill: var(--first)"], "two seeds"
    (seeds, *_), (mean, _) = marks[0], marks[-1]
    assert float(seeds) > float(mean) + 5, "below the bar, in points"


def test_bands_reach_from_the_smallest_to_the_largest_seed(written: Path) -> None:
    card = Page(written).card("reward-1")
    assert card is not None
    line = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--first\); stroke-width: 1.6', card)[0]
    band = re.findall(r'<path id="[^"]*" d="([^"]*)"/>\s*</defs>\s*<g[^>]*>\s*<use [^>]*y="([^"]*)"', card)[0]
    middle = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", line)]
    edge = [float(y) + float(band[1]) for _, y in re.findall(r"[ML] (\S+) (\S+)", band[0])]
    # Rewards of the seeds are 0.1 apart and rise by 0.01 a step: the running mean, of 13 steps, ends one step below.
    assert max(edge) - max(middle) == pytest.approx(min(middle) - min(edge), rel=1e-3)
    assert max(edge) - max(middle) == pytest.approx(0.06 / 0.13 * (max(middle) - min(middle)), rel=1e-3)


def test_one_seed_has_wilsons_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", "troll", 0, 0.5)
    page = Page(write_comparison([run, write_run(tmp_path / "two", "clip", 0, 0.75)], tmp_path / "out"))
    assert "50.0 (1)38.1 to 61.9" in page.text, "32 of 64 answers"


def test_many_rows_share_the_colours(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(i), "troll", 0, 0.5, kl_bound=0.01 * (i + 1)) for i in range(8)]
    page = Page(write_comparison(runs, tmp_path))
    assert page.tags.count("svg") == 4 * 2 + 2, "the two of the outcome have them all"
    card = page.card("reward-2")
    assert card is not None and card.count("<li>") == 2


def test_what_comes_from_the_runs_is_escaped(tmp_path: Path) -> None:
    attack = "</table><script>alert(1)</script>"
    runs = [write_run(tmp_path / str(i), "troll", 0, 0.5, task=f"'{attack}{i}'") for i in range(2)]
    page = Page(write_comparison(runs, tmp_path))
    assert "script" not in page.tags
    assert attack in page.text
    unfinished = write_run(tmp_path / "unfinished", "troll", 0, None)
    assert "No run has finished yet" in Page(write_comparison([unfinished], tmp_path)).text
