import json
import math
import random
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.pages import Page, check_page, hide_package
from troll_lab.reports.run_page import write_report
from troll_lab.runs.statistics import wilson_interval

KL_BOUND = 0.05
CARDS = {
    "success": "Success",
    "reward": "Reward",
    "kl-to-the-old-policy-mean-token": "KL to the old policy, mean token",
    "kl-to-the-old-policy-largest-token": "KL to the old policy, largest token",
    "projected-fraction": "Projected fraction",
    "multiplier-η": "Multiplier η",
    "entropy": "Entropy",
    "completion-length": "Completion length",
    "support-size": "Support size",
    "tail-mass": "Tail mass",
}


def summary_of(count, **changes):
    return {
        "status": "finished",
        "recipe": "quickstart",
        "task": "chain_sum",
        "task_about": "Sums of digits.",
        "model": "toy",
        "kl_bound": KL_BOUND,
        "steps": 8 * count,
        "rollouts": count,
        "updates_per_rollout": 8,
        "training_seconds": 132.4,
        "success_before": 0.412,
        "success_after": 0.830,
        "eval_size": 512,
        "eval_questions": 512,
        "seed": 0,
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "machine": "Linux x86_64, 2 cores",
    } | changes


def metrics_of(rollouts):
    rng = random.Random(0)
    rows = []
    for step in range(1, 8 * rollouts + 1):
        update = (step - 1) % 8
        success = 0.4 + 0.4 * step / (8 * rollouts)
        largest = 0.02 * update * math.exp(rng.gauss(0, 0.5))
        mean = largest / 50
        row = {
            "step": step,
            "loss": rng.gauss(0, 0.01),
            "reward": success + rng.gauss(0, 0.04),
            "rewards/success/mean": success + rng.gauss(0, 0.04),
            "entropy": 0.5 - 0.3 * success,
            "completions/mean_length": 4 + rng.gauss(0, 0.2),
            "trust_region/kl_before_mean": mean,
            "trust_region/kl_before_max": largest,
            "trust_region/kl_after_mean": min(mean, KL_BOUND),
            "trust_region/kl_after_max": min(largest, KL_BOUND),
            "trust_region/projected_fraction": 0.002 * update,
            "trust_region/multiplier": 0.01 * update,
            "trust_region/regression": None,
            "trust_region/support_size": 9 - 3 * success,
            "trust_region/tail_mass": 3e-6 * math.exp(rng.gauss(0, 0.2)),
            "trust_region/nonfinite": 0,
        }
        rows.append(row)
        if step % (2 * rollouts) == 0:
            rows.append({"step": step, "eval_rewards/success/mean": success, "eval_reward": success})
    return rows


def write_run(folder, rows, summary, config="learning_rate: 3.0e-05\n"):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    if rows is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def page_of(folder, rows, summary, **more):
    """The page about a run of these lines and this summary."""
    return Page(write_report(write_run(folder, rows, summary, **more)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"), metrics_of(20), summary_of(20))
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path)


def test_the_page_is_one_file_for_phones_and_both_themes(page):
    check_page(page)


def test_headline(page):
    assert "Held-out success 41.2 % → 83.0 %" in page.text
    assert "+41.8 points, in 20 rollouts, 132 s" in page.text
    low, high = wilson_interval(0.412, 512)
    assert f"before {100 * low:.1f} to {100 * high:.1f} %" in page.text
    low, high = wilson_interval(0.830, 512)
    assert f"after {100 * low:.1f} to {100 * high:.1f} %" in page.text
    assert page.text.count("512 problems") == 1 and "Held-out problems" not in page.text, "one count"
    assert page.text.count("132 s") == 2 and "132 s of training" in page.text, "one time"
    assert "chain_sum: Sums of digits. Held-out success" in page.text


@pytest.mark.parametrize(("slug", "title"), CARDS.items())
def test_every_curve_is_drawn_named_and_explained(page, slug, title):
    card = page.card(slug)
    assert card is not None and f"<h3>{title} " in card
    assert card.count("<svg") == 1 and "optimiser step" in card
    assert "bold: running mean of" in card.split("<figcaption>")[1]
    assert "left out" not in page.text


def test_kl_cards_show_the_bound(page):
    for slug in CARDS:
        assert ("bound ε = 0.05" in page.card(slug)) == (">ε</text>" in page.card(slug)) == slug.startswith("kl-")


def line(card, colour):
    """The points (rightwards, downwards) of the boldest line in `colour`."""
    (path,) = re.findall(rf'<path d="([^"]*)"[^>]*style="[^"]*stroke: var\(--{colour}\); stroke-width: 1.6', card)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


def heights(card, colour):
    return [y for _, y in line(card, colour)]


def test_lines_follow_the_data(page):
    success, entropy = (heights(page.card(slug), "first") for slug in ("success", "entropy"))
    assert success[0] > success[-1] + 20, "success rises"
    assert entropy[0] < entropy[-1] - 5, "entropy falls"
    assert ">80 %</text>" in page.card("success"), "a share in per cent"
    ((left, width),) = re.findall(r'<rect x="(\S+)" y="\S+" width="(\S+)"', page.card("entropy"))
    last, _ = line(page.card("entropy"), "first")[-1]
    assert last == pytest.approx(float(left) + float(width) / 1.01, abs=0.1), "the last step is inside of the axes"
    before, after = (heights(page.card("kl-to-the-old-policy-largest-token"), name) for name in ("first", "second"))
    assert max(before) < min(after), "KL before lies above KL after in this run"


def test_long_run_stays_small(tmp_path):
    path = write_report(write_run(tmp_path / "run", metrics_of(500), summary_of(500)))
    assert path.stat().st_size < 1_000_000
    assert "10 to a point" in Page(path).text, "4,000 values in 400 points"


def test_thinning_keeps_the_one_step_over_the_bound(tmp_path):
    rows = [{"step": step, "trust_region/kl_after_max": 0.01} for step in range(1, 4001)]
    rows[1234]["trust_region/kl_after_max"] = 0.9
    page = page_of(tmp_path / "run", rows, summary_of(500))
    spiked = page.card("kl-to-the-old-policy-largest-token")
    faint = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity: 0.3', spiked)
    ys = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", faint[0])]
    assert max(ys) - min(ys) > 120, "0.9 is 1.95 of the axis's two decades; the mean of its group of ten would be 1"


@pytest.mark.parametrize(
    ("rows", "summary"), [(None, None), ([], {}), (None, {"status": "interrupted", "success_before": 0.4})]
)
def test_no_metrics_at_all(tmp_path, rows, summary):
    page = page_of(tmp_path / "run", rows, summary)
    assert "No step was logged" in page.text
    assert "svg" not in page.tags


@pytest.mark.parametrize("rows", [metrics_of(1)[:1], metrics_of(1)[:2], [{"step": 0}], [{"step": 3, "loss": 0.1}]])
def test_few_lines(tmp_path, rows):
    page = page_of(tmp_path / "run", rows, {"status": "interrupted"})
    assert "interrupted" in page.text and "not measured" in page.text
    assert "running mean" not in page.text
    if "reward" not in rows[0]:
        assert page.text.count("this run logged no value of it") == len(CARDS)


@pytest.mark.parametrize(
    ("slug", "odd", "reason"),
    [
        ("reward", {"reward": math.nan, "eval_reward": None}, "this run logged no value of it"),
        ("multiplier-η", {"trust_region/multiplier": math.nan}, "this run logged no value of it"),
        ("tail-mass", {"trust_region/tail_mass": 0.0}, "it was never above zero"),
    ],
)
def test_a_curve_without_data_is_left_out_and_said_so(tmp_path, slug, odd, reason):
    rows = [row | {key: value for key, value in odd.items() if key in row} for row in metrics_of(1)]
    page = page_of(tmp_path / "run", rows, summary_of(1))
    assert page.card(slug) is None
    assert f"{CARDS[slug]} is left out: {reason}." in page.text
    assert sum(page.card(other) is not None for other in CARDS) == len(CARDS) - 1


def test_one_missing_line_of_a_curve_is_named(tmp_path):
    rows = [row for row in metrics_of(1) if "eval_reward" not in row]
    assert "Not logged: held out." in page_of(tmp_path / "run", rows, summary_of(1)).card("reward")


EVALUATIONS = [
    {
        "step": step,
        "answers": [
            {"question": "1 + 1 =", "text": f"  {text}", "success": success},
            {"question": "What?\nWhy?", "text": "<b>", "success": None},
            {"question": f"only at {step}", "text": "", "success": 0.0},
        ],
    }
    for step, text, success in ((0, "3", 0.0), (8, "4", 0.0), (16, "2", 1.0))
]


def answers_page(folder: Path, evaluations: list[dict[str, Any]]) -> str:
    write_run(folder, [{"step": 1, "reward": 0.5}], summary_of(1))
    (folder / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evaluations))
    return Page(write_report(folder)).text


def test_answers_before_and_after_are_at_the_top(tmp_path: Path) -> None:
    text = answers_page(tmp_path / "run", EVALUATIONS)
    assert "Answers to held-out problems problembeforeafter 1 + 1 =3 ✗2 ✓ What? Why?<b><b> Sampled" in text
    assert text.index("1 + 1 =") < text.index("Learning")


@pytest.mark.parametrize("evaluations", [[], EVALUATIONS[:1], EVALUATIONS[1:]])
def test_answers_of_one_time_only_are_not_shown(tmp_path: Path, evaluations: list[dict[str, Any]]) -> None:
    assert "Answers to held-out" not in answers_page(tmp_path / "run", evaluations)


@pytest.mark.parametrize("key", list(summary_of(1)))
@pytest.mark.parametrize("value", [None, "?", [], -1])
def test_any_summary_field_may_be_missing_or_odd(tmp_path, key, value):
    summary = summary_of(20, **{key: value})
    if value is None:
        del summary[key]
    read_by_the_curves = key in ("kl_bound", "steps", "success_before", "success_after", "eval_questions")
    page = page_of(tmp_path / "run", [{"step": 1, "reward": 0.5}] if read_by_the_curves else None, summary)
    assert (page.card("reward") is not None) == read_by_the_curves


NO_SUCCESS: dict[str, float | None] = {"success_before": None, "success_after": None}


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"success_before": None}, "Held-out success after training 83.0"),
        ({"success_after": None}, "Held-out success before training 41.2"),
        (NO_SUCCESS, "Held-out success not measured"),
        ({"success_before": 0.9}, "−7.0 points, in 20 rollouts"),
        ({"rollouts": None}, "+41.8 points, in 132 s"),
        ({"training_seconds": 5025}, "in 20 rollouts, 1 h 24 min"),
        ({"training_seconds": 719.9}, "in 20 rollouts, 12 min"),
        (NO_SUCCESS | {"reward_before": -1.25, "reward_after": 0.5}, "Held-out reward -1.25 → 0.5"),
    ],
)
def test_headline_of_partial_summaries(tmp_path, changes, headline):
    page = page_of(tmp_path / "run", None, summary_of(20, **changes))
    assert headline in page.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"step": 1, "reward": 900}\n{"step": 2, "reward": 900}\n', ""),  # a resumed run counts its later lines
        ("", '{"step": 4, "rewa'),  # what was cut short is left out
    ],
)
def test_lines_of_an_interrupted_run(tmp_path, before, after):
    rows = [{"step": step, "reward": 8.0} for step in (1, 2, 3)]
    straight, other = (write_run(tmp_path / name, rows, summary_of(1)) for name in ("straight", "other"))
    path = other / "metrics.jsonl"
    path.write_text(before + path.read_text() + after)
    assert write_report(other).read_bytes() == write_report(straight).read_bytes()


@pytest.mark.parametrize("line", ['{"step": 2, "rewa', "[2]", '{"reward": 1.0}', '{"step": "2"}', '{"step": true}'])
@pytest.mark.parametrize("after", ["", '{"step": 3}\n'])
def test_malformed_line_is_an_error_that_names_it(tmp_path, line, after):
    folder = write_run(tmp_path / "run", None, summary_of(1))
    (folder / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{after}')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        write_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("content", ["{", "[]"])
def test_malformed_summary_is_an_error_that_names_it(tmp_path, content):
    folder = write_run(tmp_path / "run", metrics_of(1), None)
    (folder / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=r"summary\.json"):
        write_report(folder)


def test_what_comes_from_the_run_is_escaped(tmp_path):
    attack = "</pre><script src='x'>alert(1)</script>&amp;$title"
    fields = dict.fromkeys(("recipe", "task", "model", "machine", "status"), attack)
    summary = summary_of(1, **fields, versions={attack: attack})
    page = page_of(tmp_path / "run", metrics_of(1), summary, config=f"note: {attack}\n")
    assert "script" not in page.tags
    assert page.text.count(attack) == 12, "title, heading, status, task, five facts, two versions, configuration"


def test_folder_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        write_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib", "pandas", "scipy"])
def test_without_a_package_the_error_names_it_and_the_extra(monkeypatch, package):
    hide_package(monkeypatch, package)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "troll-rl\[report\]"'):
        import_module("troll_lab.reports.run_page")


def test_write_report_repeats_its_bytes_whatever_pyplots_are(tmp_path):
    import matplotlib

    folder = write_run(tmp_path / "run", metrics_of(1), summary_of(1))
    first = write_report(folder).read_bytes()
    with matplotlib.rc_context({"font.weight": "bold", "xtick.direction": "in", "lines.linestyle": "--"}):
        before = dict(matplotlib.rcParams)
        assert write_report(folder).read_bytes() == first
        assert dict(matplotlib.rcParams) == before
    assert len(list(folder.iterdir())) == 4


def test_metrics_of_some_runs_are_drawn_where_they_are(tmp_path, page):
    extra = {
        "trust_region/diagnostics/sequence_kl": "kl-of-whole-sequences",
        "trust_region/diagnostics/sequence_kl_k1": "kl-of-whole-sequences",
        "trust_region/diagnostics/ratio_p50": "ratio-of-new-to-old-probability",
        "trust_region/diagnostics/clip_fraction": "what-a-clip-would-have-cut",
        "trust_region/diagnostics/something_new": "something-new",
        "critic/value_loss": "value-loss",
        "critic/explained_variance": "explained-variance",
        "clip_ratio/region_mean": "clipped-fraction",
    }
    rows = [row | dict.fromkeys(extra, 0.1) for row in metrics_of(1)]
    more = page_of(tmp_path / "run", rows, summary_of(1))
    for slug in extra.values():
        assert more.card(slug) is not None and page.card(slug) is None, slug
    assert "<li>" in more.card("kl-of-whole-sequences"), "several lines have a legend"
    assert "Critic" not in page.text and "Diagnostics" not in page.text


def test_held_out_tasks_have_colours_of_their_own(tmp_path):
    rows = [{"step": step, "eval_aime24_pass@1": 0.1, "eval_amc23_pass@1": 0.2} for step in (0, 8)]
    card = page_of(tmp_path / "run", rows, summary_of(1)).card("pass-1")
    assert re.findall(r'<i class="(.*?)"></i>(\w+)', card) == [("points second", "aime24"), ("points third", "amc23")]
    assert all(f"stroke: var(--{colour})" in card for colour in ("second", "third"))


def test_kl_target_adds_kl_wanted_and_rate(tmp_path, page):
    rates = {"learning_rate": 1e-4, "trust_region/kl_target/rate": 1e-4, "trust_region/kl_target/wanted": 0.01}
    rates |= {"trust_region/kl_target/measured": 0.02}
    rows = [row | rates for row in metrics_of(1) if "loss" in row]
    more = page_of(tmp_path / "run", rows, summary_of(1))
    assert len(set(heights(more.card("kl-measured-and-wanted"), "second"))) == 1
    assert more.card("learning-rate") is not None
    assert page.card("kl-measured-and-wanted") is None
    without = page_of(tmp_path / "run", [{"step": 1, "learning_rate": 1e-4}], summary_of(1))
    assert without.card("learning-rate") is None


def test_the_bound_is_a_line_in_kl_cards(tmp_path):
    page = page_of(tmp_path / "run", metrics_of(1), summary_of(1))
    assert ">ε</text>" in page.card("kl-to-the-old-policy-mean-token")
    assert f"bound ε = {KL_BOUND:g}" in page.text
    assert ">ε</text>" not in page.card("projected-fraction")


def test_a_run_without_a_trust_region_misses_none(tmp_path):
    rows = [{name: value for name, value in row.items() if "trust_region" not in name} for row in metrics_of(1)]
    page = page_of(tmp_path / "clip", rows, summary_of(1, surrogate="clip"))
    assert "left out" not in page.text
    assert "KL to the old policy" not in page.text
    assert page.card("reward") is not None
