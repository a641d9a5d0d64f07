"""The third part of the protocol: its runs, what decides it, and what was predicted."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from experiments import RECIPES, followed, page, predictions, second, second_analysis, third, third_analysis
from experiments.protocol import Phase
from experiments.table import Result
from experiments.third import Arm
from tests.experiments.made import DOCS, fill, result, run_folder
from troll.trust_region.rate import wanted_kl
from troll_lab import recipes

METHODS = ("troll", "proximal", "penalty", "clip")


def settings(name: str, arm: Arm) -> tuple[tuple[str, str], ...]:
    named = {**third.settings_of(third.REGIMES[third.TABLES[name][0]], arm), "tail": "bucket"}
    return tuple(sorted((field, value) for field, value in named.items() if value is not None))


def rows(name: str, shifts: dict[tuple[str, int], float] | None = None) -> list[Result]:
    """The complete runs of a table: 50 % in the mean of an arm, plus its shift, by method and the arm's place."""
    (regime, seeds), found, rng = third.TABLES[name], [], np.random.default_rng(0)
    places: Counter[str] = Counter()
    for arm in third.arms(name):
        place = places[arm.method]
        places[arm.method] += 1
        noise = 0.02 * rng.standard_normal(len(seeds))
        for seed, deviation in zip(seeds, noise - noise.mean(), strict=True):
            run = result(
                second.METHODS[arm.method].surrogate,
                arm.rate,
                seed,
                0.5,
                regime=third.REGIMES[regime].recipe,
                settings=settings(name, arm),
                rates=() if arm.target is None else (arm.rate, 1e-4, 2e-4),
            )
            shift = (shifts or {}).get((arm.method, place), 0.0)
            phase: Phase = "exploratory" if name == third.DIAL else "counted"
            found.append(replace(run, phase=phase, success_after=0.5 + shift + deviation))
    return found


def shifted(place: int, by: float, methods: Sequence[str] = METHODS) -> dict[tuple[str, int], float]:
    return {(method, place): by for method in methods}


def test_methods_are_those_that_the_second_part_found_best() -> None:
    tables = page.read_tables(DOCS / "results")
    for name, former in third.FORMER.items():
        chosen = second_analysis.chosen(second_analysis.candidates(former, tables[former]))
        found = second_analysis.contest(former, tables[former])
        for method, (changes, rate) in third.REGIMES[name].methods.items():
            assert (changes, rate) == (chosen[method].changes, found.methods[method].best_rate), (name, method)


def test_ages_are_those_of_the_recipes() -> None:
    for regime in third.REGIMES.values():
        file = RECIPES / f"{regime.recipe}.yaml"
        changes = [f"--{name}={value}" for name, value in regime.changes.items()]
        recipe = recipes.load(str(file) if file.is_file() else regime.recipe, changes)
        training, schedule = recipe.training, recipes.plain(recipe)["lr_scheduler_type"]
        assert (training.updates_per_rollout, training.anchor_staleness) == (regime.updates, regime.staleness)
        assert regime.decay == {"constant": None, "linear": training.max_steps}[schedule]
    assert all(predictions.LAWS[predictions.LAW](age) == pytest.approx(wanted_kl(1, age, age)) for age in (7, 31, 135))


def test_runs_of_a_seed_are_told_apart_by_their_rows() -> None:
    sizes = {name: len(third.arms(name)) * len(seeds) for name, (_, seeds) in third.TABLES.items()}
    assert sum(sizes[name] for name in third.FORMER) == 720
    assert (sizes["third-smollm2"], sizes[third.DIAL]) == (30, 256)
    for name, (_, seeds) in third.TABLES.items():
        made = rows(name)[:: len(seeds)]  # of one seed
        found = [[arm for arm, runs in third_analysis.runs_of(name, [row], row.phase).items() if runs] for row in made]
        assert found == [[arm] for arm in third.arms(name)]


@pytest.mark.parametrize(
    ("changed", "origin"),
    [(1, {"commit": "9876543210"}), (1, {"machine": "1 x NVIDIA H200"}), (2, {"commit": ""}), (2, {"commit": "01+"})],
)
def test_contest_refuses_a_seed_of_several_commits_or_machines(changed: int, origin: dict[str, Any]) -> None:
    found = [row for row in rows("third-a") if row.seed == 40][:2]
    assert third_analysis.contest("third-a", found).size == 2
    found[:changed] = [replace(row, **origin) for row in found[:changed]]
    with pytest.raises(ValueError, match="seed 40 are not of one commit on one machine"):
        third_analysis.contest("third-a", found)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 39},
        {"phase": "exploratory"},
        {"learning_rate": 1e-3},
        {"settings": ()},
        {"regime": "sparse-signal-long"},
    ],
)
def test_contest_refuses_runs_that_the_protocol_has_not(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="third-a: the protocol has no"):
        third_analysis.contest("third-a", [replace(rows("third-a")[0], **changes)])


@pytest.mark.parametrize("more", [(), (("num_generations", "2"),)])
def test_contest_refuses_a_second_run_of_a_seed(more: tuple[tuple[str, str], ...]) -> None:
    first = rows("third-a")[0]
    with pytest.raises(ValueError, match="two runs of"):
        third_analysis.contest("third-a", [first, replace(first, settings=tuple(sorted((*first.settings, *more))))])


@pytest.mark.parametrize(
    ("regime", "shifts", "wanted"),
    [
        ("a", {}, ("holds", "holds")),
        # A start that matters, whichever is worse: the mean over starts is still within the margin.
        ("b", shifted(0, -0.08), ("refuted", "holds")),
        ("b", shifted(0, 0.08), ("refuted", "holds")),
        # A constant rate that is better; the target may gain.
        ("a", shifted(2, 0.08), ("holds", "refuted")),
        ("a", shifted(2, -0.2), ("holds", "holds")),
        # One method that loses, and one that may.
        ("a", shifted(2, 0.12, ("clip",)), ("holds", "refuted")),
        ("a", shifted(2, 0.053, ("clip",)), ("holds", "open")),
        # A difference at the margin.
        ("a", {**shifted(2, 0.05), **shifted(1, 0.05)}, ("open", "holds")),
        # Old rollouts decide nothing.
        ("d", shifted(0, -0.3), ("holds", "holds")),
    ],
)
def test_hypotheses_of_complete_runs(
    regime: str, shifts: dict[tuple[str, int], float], wanted: tuple[str, str]
) -> None:
    contests = [
        third_analysis.contest(name, rows(name, shifts if name[-1] == regime else None)) for name in third.FORMER
    ]
    found = third_analysis.hypotheses(contests)
    assert tuple(third_analysis.overall(name, found) for name in ("K1", "K2")) == wanted


def test_hypotheses_of_another_model() -> None:
    for by, verdict in ((0.0, "holds"), (0.3, "refuted")):
        found = third_analysis.contest("third-smollm2", rows("third-smollm2", shifted(1, by)))
        (only,) = third_analysis.hypotheses([found])
        assert (only.name, only.verdict, list(only.by_method)) == ("K3", verdict, ["troll", "penalty", "clip"])


def test_dials_have_the_runs_of_their_regime_in_the_middle() -> None:
    found = third_analysis.contest("third-a", rows("third-a", {("clip", 1): 0.1}))
    dials = third_analysis.dials(found, rows(third.DIAL, {("penalty", 5): 0.2}))
    assert [(dial.method, dial.setting) for dial in dials][:2] == [("troll", "kl_target"), ("troll", "learning_rate")]
    best = {(dial.method, dial.setting): dial.best for dial in dials}
    assert best["clip", "kl_target"] == 0.03 and best["penalty", "learning_rate"] == 3.3e-5
    for dial in dials:
        values = [0.0033, 0.01, 0.03, 0.09, 0.27] if dial.setting == "kl_target" else [1.1e-5, 3.3e-5, 1e-4, 3e-4, 9e-4]
        assert list(dial.successes) == values and {len(each) for each in dial.successes.values()} == {8}
    assert {dial.best for dial in third_analysis.dials(found, [])} == {None}


def test_hypotheses_are_open_until_the_last_run_is_there() -> None:
    contests = [third_analysis.contest(name, rows(name)[name == "third-b" :]) for name in third.FORMER]
    found = third_analysis.hypotheses(contests)
    assert [each.verdict for each in found if each.table == "third-b"] == ["open"] * 2
    assert {each.p_value for each in found if each.table == "third-b"} == {None}
    assert [third_analysis.overall(name, found) for name in ("K1", "K2")] == ["open"] * 2
    assert (contests[1].size, contests[1].planned, len(contests[1].seeds)) == (287, 288, 23)
    (first, *_) = [each for each in found if each.table == "third-b"]
    assert first.estimate is not None and first.estimate.size == 23  # seeds with all runs are shown


def second_part(kl: float, power: float) -> second_analysis.Contest:
    """Runs of part two whose KL in the last of eight updates is kl at 1e-4, and that collapse at 1e-3."""
    method, changes = "troll", second.METHODS["troll"].configurations[0]
    named = {**second.settings_of(method, changes), "tail": "bucket"}
    fields = tuple(sorted((field, value) for field, value in named.items() if value is not None))
    share = np.mean([(age / 7) ** 1.7 for age in range(8)])
    made = []
    for rate, success in ((3e-5, 0.2), (1e-4, 0.4), (3e-4, 0.3), (1e-3, 0.0)):
        last = 1e-4 if rate == 1e-3 else kl * (rate / 1e-4) ** power
        made += [
            replace(
                result("troll", rate, seed, 0.5, settings=fields, token_kl=last * share * factor), success_after=success
            )
            for seed, factor in ((20, 0.5), (21, 2.0))  # a geometric mean of 1
        ]
    runs = {rate: {row.seed: row for row in made if row.learning_rate == rate} for rate in (3e-5, 1e-4, 3e-4, 1e-3)}
    found = second_analysis.Method("troll", fields, "TROLL", runs)
    return second_analysis.Contest(second.REGIMES["second-a"], {"troll": found})


def test_predict_finds_the_rate_of_a_kl_and_its_success() -> None:
    found = second_part(kl=0.03, power=1.5)
    assert list(predictions.last_kls("third-a", "troll", found)) == [3e-5, 1e-4, 3e-4]  # without the collapse
    at_the_best = predictions.predict("third-a", "troll", 0.03, found)
    assert at_the_best is not None
    assert (at_the_best.rate, at_the_best.success) == (pytest.approx(1e-4), pytest.approx(0.4))
    assert predictions.last_kls("third-a", "clip", replace(found, methods={"clip": found.methods["troll"]}))[
        1e-4
    ] == pytest.approx(0.03 * np.mean([(age / 7) ** 1.7 for age in range(8)]))  # its rows have the last update's
    halfway = predictions.predict("third-a", "troll", 0.03 * 3**0.75, found)
    assert halfway is not None
    assert (halfway.rate, halfway.success) == (pytest.approx(1e-4 * math.sqrt(3)), pytest.approx(0.35))
    beyond = predictions.predict("third-a", "troll", 1.0, found)
    assert beyond is not None and beyond.success is None and beyond.rate > 3e-4
    below = predictions.predict("third-a", "troll", 1e-4, found)
    assert below is not None and below.success is None and below.rate < 3e-5


def test_predict_needs_runs() -> None:
    found = replace(second_part(0.03, 1.5), methods={})
    assert predictions.predict("third-a", "troll", 0.03, found) is None
    assert predictions.losses("third-a", 0.03, found) == dict.fromkeys(METHODS)


def test_page_shows_the_third_part_with_and_without_runs(tmp_path: Path) -> None:
    committed = {name: each for name, each in page.read_tables(DOCS / "results").items() if name in second.REGIMES}
    names = ("size", "hypotheses", "third-b", "third-smollm2", "dial", "predictions", "laws")
    template = " ".join(f"{{{{third {name}}}}}" for name in names) + " {{course third-b}}"
    text, _ = fill(committed, tmp_path, template)
    assert "0 of 750 counted runs" in text and "| K1 | (a) and (b) | – | – | – | – | – | – | – | open |" in text
    text, _ = fill({**committed, "third-b": rows("third-b", shifted(0, -0.2))}, tmp_path, template)
    assert "288 of 750 counted runs" in text and "*(b) 32 updates a rollout: 288 of 288 counted runs.*" in text
    assert "refuted |" in text and "| (a) and (b) | – | – | – | – | – | – | – | refuted |" in text
    assert "| 1.0e-4 to 2.0e-4 |" in text  # the rates of the second half
    assert "|  | rate | rollout 1 | rollout 2 | rollout 3 |\n" in text  # more are not there
    assert "| TROLL | from 1e-6 | 1.0e-6: 6.2 | 1.0e-4: 25.0 | 2.0e-4: 50.0 |\n" in text
    assert "| TROLL | at 3e-5 | 6.2 | 25.0 | 50.0 |\n" in text


def test_starts_have_means_with_and_without_target(tmp_path: Path) -> None:
    committed = {name: each for name, each in page.read_tables(DOCS / "results").items() if name in second.REGIMES}
    runs = rows("third-b", {("troll", 0): -0.2, ("troll", 1): -0.1})
    text, drawings = fill({**committed, "third-b": runs}, tmp_path, "{{figure starts}}")
    (panel,) = drawings["starts"].data  # (a) has no runs
    line, former = panel["lines"]["TROLL"], second_analysis.contest("second-b", committed["second-b"]).methods["troll"]
    assert (line["start"], line["with"]) == ([1e-6, 1e-2], pytest.approx([0.3, 0.4]))
    assert (line["rate"], line["without"]) == ([*former.means], pytest.approx([*former.means.values()], abs=1e-4))
    (axes,) = drawings["starts"].draw(drawings["starts"].data).axes
    assert len(axes.lines) == 2 * len(METHODS) and axes.get_xscale() == "log" and "starts.svg" in text


def test_course_has_rates_before_schedule(tmp_path: Path) -> None:
    text, _ = fill({"third-smollm2": rows("third-smollm2")}, tmp_path, "{{course third-smollm2}}")
    # After 8, 16 and 24 of 128 updates: rates over 121/128, 113/128 and 105/128.
    assert "| TROLL | from 1e-2 | 1.1e-2: 6.2 | 1.1e-4: 25.0 | 2.4e-4: 50.0 |\n" in text


def test_followed_writes_what_the_figure_draws(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run", settings={"kl_target": 0.03, "learning_rate": 1e-2})
    monkeypatch.setattr(followed, "RESULT", tmp_path / "followed.json")
    monkeypatch.setattr(sys, "argv", ["followed", str(folder)])
    with pytest.raises(ValueError, match=r"run has no kl_target, .* lack trust_region/kl_target/measured"):
        followed.main()
    metrics = folder / "metrics.jsonl"
    more = '"trust_region/kl_target/measured": 0.01, "trust_region/kl_target/wanted": 0.02, "learning_rate"'
    metrics.write_text(metrics.read_text().replace('"learning_rate"', more))
    followed.main()
    text, drawings = fill({}, tmp_path, "{{figure followed}}")
    (line,) = drawings["followed"].data
    assert line == {
        "surrogate": "troll", "start": 1e-2, "step": [8, 16], "kl": [0.01, 0.01], "wanted": [0.02, 0.02],
        "rate": [1.23e-5, 1e-4],
    }  # fmt: skip
    rates, kls = drawings["followed"].draw(drawings["followed"].data).axes
    assert rates.get_yscale() == "log" and "followed.svg" in text
    assert [np.asarray(each.get_ydata()).tolist() for each in kls.lines] == [line["kl"], line["wanted"]]


RIVAL = ("plugins", '["experiments.rival_rate"]')


def test_contest_refuses_runs_of_the_rival_rule() -> None:
    row = rows("third-a")[0]
    assert third_analysis.contest("third-a", [row]).size == 1
    rival = replace(row, settings=(*row.settings, RIVAL))
    with pytest.raises(ValueError, match="third-a: the protocol has no counted run of troll"):
        third_analysis.contest("third-a", [rival])


def test_rival_rule_is_compared_on_seeds_that_both_have(tmp_path: Path) -> None:
    ours = rows("third-a")
    # TROLL from 1e-2: ten points behind in three seeds.
    few = [row for row in ours if (row.surrogate, row.learning_rate) == ("troll", 1e-2)][:3]
    theirs = [
        replace(row, success_after=row.success_after - 0.1, settings=(*row.settings, RIVAL), phase="exploratory")
        for row in few
    ]
    text, _ = fill({"third-a": ours, third.RIVALS: theirs}, tmp_path, "{{third rivals}}")
    lines = [line for line in text.splitlines() if "| 3 |" in line]
    assert len(lines) == 1 and lines[0].startswith("| TROLL | 1e-2 | 3 |") and "| +10.0 [+10.0, +10.0] |" in lines[0]
    assert text.count("| 0 | – | – | – |") == 7
    with pytest.raises(ValueError, match=r"no run of third-a is as that of troll at 0\.5"):
        third_analysis.rivals(third_analysis.contest("third-a", ours), [replace(few[0], learning_rate=0.5)])
