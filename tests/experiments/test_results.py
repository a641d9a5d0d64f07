"""The published results: that page and tables agree, and how both are made."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats
from trl.trainer.utils import RepeatSampler

from experiments import RECIPES, analysis, figures, grid, page, second, second_analysis, table, tables
from experiments import __main__ as command
from experiments.collect import _recipe, collect
from experiments.inference import crossed_bootstrap_interval
from experiments.protocol import LEARNING_RATES, METHODS, TUNING_RATES, TUNING_SEEDS, Phase
from experiments.table import Result
from troll.trl.surrogates import settings_read
from troll_lab.runs.grid import PlannedRun, expand
from troll_lab.runs.statistics import SeedMean

DOCS = Path(__file__).parents[2] / "docs"
REGIME = "sparse-signal"
SETTINGS = {"troll": (("kl_bound", "0.05"),), "clip": (("epsilon", "0.2"),)}
DRAWS = 64


def result(surrogate: str, rate: float, seed: int, success: float, **changes: Any) -> Result:
    """A run of four rollouts with as many right draws as its success says, the same ones for a seed and success."""
    right = np.random.default_rng(seed).permutation(DRAWS) < round(success * DRAWS)
    values: dict[str, Any] = {
        "regime": REGIME,
        "surrogate": surrogate,
        "learning_rate": rate,
        "settings": SETTINGS.get(surrogate, ()),
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


def study(folder: Path, seeds: int = 4, phase: Phase = "counted", spread: float = 0.2) -> list[Result]:
    """TROLL and the clip at two rates; TROLL is better at the higher one."""
    folder.mkdir(parents=True, exist_ok=True)
    name = table.write_questions(folder, [draw // 2 for draw in range(DRAWS)])
    means = {("troll", 1e-4): 0.4, ("troll", 3e-4): 0.6, ("clip", 1e-4): 0.45, ("clip", 3e-4): 0.1}
    rng = np.random.default_rng(0)
    return [
        result(surrogate, rate, seed, mean + spread * (rng.random() - 0.5), questions=name, phase=phase)
        for (surrogate, rate), mean in means.items()
        for seed in range(seeds)
    ]


def write(folder: Path, name: str, rows: list[Result]) -> None:
    (folder / f"{name}.csv").write_text(table.to_csv(table.merge([], rows)))


# What is committed.


#: Without the settings, recipes and surrogates of the package: pages of finished runs do not depend on what these are.
ROWS_ONLY = """
import sys
gone = ("troll.trl", "troll.verl", "troll_lab.recipes", "troll_lab.tasks", "troll_lab.runs.grid", "trl", "transformers")
sys.modules.update(dict.fromkeys(gone))  # an import fails
from pathlib import Path
from experiments.page import write_pages
write_pages(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_pages_say_what_the_tables_say_and_need_only_these(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROWS_ONLY, str(DOCS / "results"), str(tmp_path)]
    subprocess.run(command, cwd=DOCS.parent, check=True)
    written = [*(tmp_path / "study").iterdir()]
    assert {path.stem for path in written} == page.read_templates().keys()
    for path in written:
        assert path.read_bytes() == (DOCS / "study" / path.name).read_bytes(), "run: make results"
    drawn = {path.name for path in (tmp_path / "results").glob("*.svg")}
    for name in drawn:  # the bytes depend on the fonts of the machine
        ours, published = (figures.shown(folder / "results" / name) for folder in (tmp_path, DOCS))
        assert ours == published, f"run: make results ({name})"
        assert (DOCS / "results" / name).with_suffix(".png").is_file(), "run: make results"
    assert {path.name for path in (DOCS / "results").glob("*.svg")} == drawn, "a figure of former data"


def test_numbers_in_sentences_stand_in_the_tables() -> None:
    """Sentences are written by hand: one whose number is in no table any more was forgotten."""
    templates = page.read_templates()
    pages = "".join((DOCS / "study" / f"{name}.md").read_text(encoding="utf-8") for name in templates)
    blocks = re.findall(r"<!-- from the tables.*?<!-- end -->", pages, re.S)
    prose = re.sub(r"\{\{.*?\}\}|`[^`]*`", "", "".join(templates.values()))
    decimals = r"(?<![\w.])\d+\.\d+"
    found = set(re.findall(decimals, prose))
    assert len(found) > 30
    assert found - set(re.findall(decimals, "".join(blocks))) == {"0.95", "2509.26114"}, "Adam's β₂ and a paper remain"


def test_committed_tables_are_sorted_consistent_and_small() -> None:
    for path in (DOCS / "results").glob("*.csv"):
        rows = table.read_csv(path)
        assert table.to_csv(table.merge([], rows)) == path.read_text(encoding="utf-8"), path
        for row in rows:
            if row.verdicts:
                assert row.successes.mean() == pytest.approx(row.success_after, abs=1e-6), (path, row.identity)
                assert len(table.read_questions(path.parent, row.questions)) == row.eval_size
    assert sum(path.stat().st_size for path in (DOCS / "results").glob("*")) < 10e6


def test_a_run_that_was_made_again_was_the_same() -> None:
    """The page says so of those that are in two tables."""
    counted = {row.identity: row for row in table.read_csv(DOCS / "results" / "sparse-signal.csv")}
    again = table.read_csv(DOCS / "results" / "forgetting.csv")
    for row in again:
        first = counted[row.identity]
        for name in ("success_after", "curve", "verdicts", "entropy", "sequence_kl"):
            assert getattr(row, name) == getattr(first, name), (name, row.identity)


# Tables.


def test_new_rows_replace_old_ones_of_the_same_run() -> None:
    old, other = result("troll", 1e-4, 0, 0.5), result("troll", 1e-4, 1, 0.5)
    new = replace(old, success_after=0.75)
    assert table.merge([other, old], [new]) == [new, other]


RISING = (0, 20, 40, 60, 80, 80)


def test_rollouts_to_a_half_of_the_running_mean() -> None:
    reached = [
        result("troll", 1e-4, 0, 0.5, completions=100, curve=curve).rollouts_to_half
        for curve in (RISING, (50, 50, 50, 50, 50, 50), (60, 60), (100, 40, 40, 40, 20))
    ]
    assert reached == [6, 5, 2, None], "of two rollouts, the running mean has both"


@pytest.mark.parametrize(
    ("final", "curve", "expected"),
    [
        (0.27, RISING, True),  # the best five have a mean of .56
        (0.29, RISING, False),
        (0.1, (*RISING, 0, 0, 0), True),
        (0.0, (4,) * 10, False),  # there was nothing to lose
        (0.0, (6,) * 10, True),
        (0.1, (50, 10, 10, 10, 10), False),  # one lucky rollout is no learning
    ],
)
def test_a_run_collapses_that_loses_half_of_its_best(final: float, curve: tuple[int, ...], expected: bool) -> None:
    run = result("troll", 1e-4, 0, 0.5, completions=100, curve=curve, success_after=final)
    assert run.collapsed is expected


def test_verdicts_are_put_from_the_order_of_trls_evaluation_into_that_of_the_questions() -> None:
    order = list(RepeatSampler(range(9), mini_repeat_count=1, seed=5))
    evaluated = table.pack([int(row in (2, 7)) for row in order])
    row = result("troll", 1e-4, seed=5, success=0, verdicts=evaluated, eval_size=9)
    assert row.successes.nonzero()[0].tolist() == [2, 7]


def test_rows_of_another_order_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    order, path = table.evaluation_order(4, seed=0), run / "verdicts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row": order}))
    assert collect([run], tmp_path / "new.csv", phase="exploratory") == (1, 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row": order[::-1]}))
    with pytest.raises(ValueError, match="not in the order of an evaluation with seed 0"):
        collect([run], tmp_path / "new.csv", phase="exploratory")


@pytest.mark.parametrize("verdicts", [[1], [0, 1, 1, 0, 1, 0, 0, 0], [0, 0, 1] * 7])
def test_verdicts_are_packed_without_loss(verdicts: list[int]) -> None:
    assert table.unpack(table.pack(verdicts), len(verdicts)).astype(int).tolist() == verdicts
    assert table.pack([1, 0, 0, 0, 0, 0, 0, 0, 1, 1]) == "80c0"  # bits from the left


def test_equal_lists_of_questions_have_one_name(tmp_path: Path) -> None:
    name = table.write_questions(tmp_path, [7, 3, 7])
    assert table.write_questions(tmp_path, [0, 1, 0]) == name != table.write_questions(tmp_path, [0, 1, 1])
    assert table.read_questions(tmp_path, name).tolist() == [0, 1, 0]


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv is not a table of results: it has no column collapsed"):
        table.read_csv(tmp_path / "other.csv")
    write(tmp_path, "bad", [result("troll", 1e-4, 0, 0.5, phase="guessed")])
    with pytest.raises(ValueError, match=r"bad.csv, line 2: phase must be one of tuning, counted, exploratory"):
        table.read_csv(tmp_path / "bad.csv")


# Collecting.


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


def test_collecting_takes_what_the_folders_say(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", settings={"temperature": 0.5})
    csv = tmp_path / "results" / "new.csv"
    assert collect([run], csv, phase="exploratory") == (1, 0)
    (row,) = table.read_csv(csv)
    name = row.questions
    assert row == Result(
        regime=REGIME,
        surrogate="troll",
        learning_rate=3e-4,
        # The first two, for TROLL reads them; the temperature, for the recipe has another; no epsilon.
        settings=(("kl_bound", "0.05"), ("regression_weight", "1.0"), ("temperature", "0.5")),
        seed=0,
        phase="exploratory",
        success_before=None,
        success_after=0.5,
        right_before=0.875,
        right_after=0.75,
        formatted_after=None,
        eval_size=4,
        token_kl=0.002,
        sequence_kl=None,
        completions=256,
        curve=(1, 3),
        entropy=(0.1235, 0.1),
        questions=name,
        verdicts="a0",
        commit="0123456789",
        machine="CPU",
        versions="python 3.11 torch 2.13",
    )
    assert table.read_questions(csv.parent, name).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("surrogate", ["troll", "kl_penalty", "clip"])
def test_a_planned_run_is_missing_until_the_table_has_it(tmp_path: Path, surrogate: str) -> None:
    axes = {"surrogate": [surrogate], "temperature": ["0.5"], "learning_rate": ["3e-4"], "seed": ["0", "1"]}
    planned = expand([str(RECIPES / f"{REGIME}.yaml")], axes)
    csv, elsewhere = tmp_path / "results.csv", tmp_path / "elsewhere"
    assert grid.missing(planned, csv, elsewhere) == planned
    read = settings_read(planned[0].recipe.training)
    folder = run_folder(tmp_path / "runs" / planned[0].name, surrogate, surrogate_settings=read)
    (folder / "config.yaml").write_text(yaml.safe_dump({**planned[0].settings, "output_dir": str(folder)}))
    collect([folder], csv, phase="exploratory")
    assert grid.missing(planned, csv, elsewhere) == planned[1:]
    assert grid.missing(planned, csv, folder.parent) == planned  # its folder knows it, and leaves it as it is


def test_make_adds_what_a_table_lacks_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an interruption, with what was finished until then."""
    asked: list[list[int]] = []

    def compare(runs: list[PlannedRun], folder: Path, *_: Any) -> str:
        asked.append([run.recipe.training.seed for run in runs])
        for run in runs[:1]:
            read = settings_read(run.recipe.training)
            made = run_folder(folder / run.name, "clip", surrogate_settings=read, seed=run.recipe.training.seed)
            (made / "config.yaml").write_text(yaml.safe_dump({**run.settings, "output_dir": str(made)}))
        manifest = {"runs": {run.name: {} for run in runs}, "command": "a command"}
        (folder / "compare.json").write_text(json.dumps(manifest))
        return "interrupted"

    monkeypatch.setattr(grid, "compare", compare)
    axes = {"surrogate": ["clip"], "epsilon": ["0.1", "0.3"], "learning_rate": ["3e-4"]}
    csv = tmp_path / "results.csv"
    made: list[tuple[str, int]] = []
    for seed in ("0", "1", "0"):
        planned = expand([str(RECIPES / f"{REGIME}.yaml")], {**axes, "seed": [seed]})
        made.append(grid.make(planned, csv, "tuning", tmp_path / f"again-{len(made)}", None, "a command"))
    assert made == [("interrupted", 1)] * 3 and asked == [[0, 0], [1, 1], [0]]
    found = [(row.seed, dict(row.settings)["epsilon"]) for row in table.read_csv(csv)]
    assert found == [(0, "0.1"), (1, "0.1"), (0, "0.3")]
    planned = expand([str(RECIPES / f"{REGIME}.yaml")], {**axes, "seed": ["0"]})
    assert grid.make(planned, csv, "tuning", tmp_path / "again", None, "a command") == ("finished", 0)


def test_collecting_a_comparison_again_changes_nothing(tmp_path: Path) -> None:
    folder, csv = tmp_path / "compare", tmp_path / "results.csv"
    for seed in (1, 0, 100):
        run_folder(folder / f"troll-{seed}", seed=seed)
    run_folder(folder / "clip-0", "clip", status="interrupted")
    names = ["troll-1", "troll-0", "troll-100", "clip-0", "clip-1"]
    command = f"troll compare sparse-signal --seeds 2 --output_dir {Path.cwd()}/runs/a"
    (folder / "compare.json").write_text(json.dumps({"runs": {name: {} for name in names}, "command": command}))
    assert collect([folder], csv, phase="counted") == (3, 2)
    first = csv.read_bytes()
    assert [(row.seed, row.phase) for row in table.read_csv(csv)] == [(seed, "counted") for seed in (0, 1, 100)]
    assert collect([folder], csv, phase="counted") == (3, 2)
    assert csv.read_bytes() == first
    assert csv.with_suffix(".txt").read_text() == "troll compare sparse-signal --seeds 2 --output_dir runs/a\n"
    collect([run_folder(tmp_path / "later", "clip", seed=5)], csv, phase="exploratory")
    rows = table.read_csv(csv)
    assert (rows[0].surrogate, rows[0].phase, len(rows)) == ("clip", "exploratory", 4)


# The second part.


def second_settings(table_name: str, method: str, number: int) -> tuple[tuple[str, str], ...]:
    """The settings that a row of a configuration names, with one that no longer needs to exist."""
    configuration = second.settings_of(method, second.METHODS[method].configurations[number])
    named = {**configuration, **second.REGIMES[table_name].changes, "tail": "bucket"}
    return tuple(sorted((name, value) for name, value in named.items() if value is not None))


def tuning_rows(table_name: str, method: str, number: int, mean: float) -> list[Result]:
    """The complete tuning of a configuration."""
    regime, surrogate = second.REGIMES[table_name], second.METHODS[method].surrogate
    settings = second_settings(table_name, method, number)
    return [
        result(surrogate, rate, seed, mean, regime=regime.recipe, settings=settings, phase="tuning")
        for rate in regime.tuning_rates
        for seed in second.TUNING_SEEDS
    ]


@pytest.mark.parametrize("table_name", second.REGIMES)
def test_each_tuning_run_of_the_second_part_has_one_configuration(table_name: str) -> None:
    tried = second_analysis.candidates(table_name, page.read_tables(DOCS / "results")[table_name])
    assert len(tried) == 15 and all(one.complete and one.size == 4 * len(one.runs) for one in tried)


@pytest.mark.parametrize("written", ["0.5", "0.50", "5e-1"])
def test_candidates_knows_a_number_however_it_is_written(written: str) -> None:
    (row, *_) = tuning_rows("second-a", "proximal", 1, 0.5)
    settings = tuple((name, written if name == "kl_bound" else value) for name, value in row.settings)
    (found,) = [one for one in second_analysis.candidates("second-a", [replace(row, settings=settings)]) if one.size]
    assert (found.method, found.changes) == ("proximal", second.METHODS["proximal"].configurations[1])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("proximal", {"settings": {"kl_bound": "0.4"}}),
        ("proximal", {"settings": {"constraint": "batch"}}),
        ("penalty", {"settings": {"surrogate_kwargs.clip": "1"}}),
        ("clip", {"settings": {"epsilon": ""}}),
        ("clip", {"settings": {"rollout_delay": ""}}),
        ("clip", {"surrogate": "none"}),
        ("clip", {"regime": "sparse-signal"}),
    ],
)
@pytest.mark.parametrize("phase", ["tuning", "counted"])
def test_candidates_refuses_what_the_second_part_has_not(method: str, changes: dict[str, Any], phase: Phase) -> None:
    (row, *_) = tuning_rows("second-d", method, 0, 0.5)
    settings = dict(row.settings) | changes.get("settings", {})
    changes = {**changes, "settings": tuple((name, value) for name, value in settings.items() if value)}
    with pytest.raises(ValueError, match=r"second-d: a .* run of .* has a configuration that the protocol does not"):
        second_analysis.candidates("second-d", [replace(row, phase=phase, **changes)])


@pytest.mark.parametrize(("setting", "text"), [(("solver", "bisection"), "bisection"), (("tail", "floor"), "floor")])
def test_candidates_refuses_runs_that_differ_in_another_setting(setting: tuple[str, str], text: str) -> None:
    first, *others = tuning_rows("second-a", "troll", 0, 0.5)
    first = replace(first, settings=tuple((dict(first.settings) | dict([setting])).items()))
    with pytest.raises(ValueError, match=rf"troll with seed 101 has {setting[0]}=.*{text}, but no configuration of"):
        second_analysis.candidates("second-a", [first, *others])


def test_second_part_chooses_the_best_configuration_of_complete_tuning_runs() -> None:
    rows = []
    for method, number, mean in [("troll", 0, 0.25), ("troll", 1, 0.5), ("troll", 2, 0.5), ("clip", 0, 0.75)]:
        rows += tuning_rows("second-a", method, number, mean)
    chosen = second_analysis.chosen(second_analysis.candidates("second-a", rows))
    assert {method: one.changes for method, one in chosen.items()} == {"troll": {"kl_bound": "0.2"}}
    shown = tables.second_tuning("second-a", rows)
    assert shown.startswith("*(a) 8 updates a rollout: 32 of 120 tuning runs; nothing is chosen before all are there.*")
    assert "| TROLL | `kl_bound=0.2` | 50.0 ± 0.0 (4) | 50.0 ± 0.0 (4) | 50.0 | yes |" in shown


def second_rows(table_name: str, means: dict[str, list[float]], chosen: int = 0) -> list[Result]:
    """A regime's complete tuning, which chooses one configuration of all methods, and its counted runs.

    The success of a counted run is the mean of its method at its rate, a little better for two of three seeds.
    """
    regime, rows = second.REGIMES[table_name], []
    for method, changes in second.configurations():
        number = second.METHODS[method].configurations.index(changes)
        tuning = tuning_rows(table_name, method, number, 0.5 if number == chosen else 0.25)
        rows += tuning
        if number == chosen:
            for rate, mean in zip(regime.rates, means[method], strict=True):
                rows += [
                    replace(
                        tuning[0], phase="counted", learning_rate=rate, seed=seed, success_after=mean + seed % 3 / 64
                    )
                    for seed in regime.seeds
                ]
    return rows


EQUAL = {method: [0.25, 0.5, 0.25] for method in second.METHODS}


def second_contests(**means: dict[str, list[float]]) -> dict[str, second_analysis.Contest]:
    return {
        name: second_analysis.contest(name, second_rows(name, means.get(name[-1], EQUAL), chosen=1))
        for name in second.REGIMES
    }


def test_second_part_of_equal_methods_confirms_only_that_the_new_one_is_no_worse() -> None:
    contests = second_contests()
    assert all(contest.complete for contest in contests.values())
    assert contests["second-a"].methods["clip"].best_rate == 3e-4 and contests["second-a"].fast_rate == 1e-3
    first, *others = second_analysis.hypotheses(contests)
    # The differences are all 0: no less than -5 points for sure, and not above 0.
    assert (first.holds, len(first.tests), [one.holds for one in others]) == (True, 6, [False] * 3)
    assert [len(one.tests) for one in others] == [4, 3, 2]


def test_second_part_confirms_a_lead_at_the_fast_rate_and_on_old_rollouts() -> None:
    better = {**EQUAL, "proximal": [0.25, 0.5, 0.4]}
    contests = second_contests(a=better, b=better, d={**EQUAL, "proximal": [0.25, 0.6, 0.25]})
    hypotheses = second_analysis.hypotheses(contests)
    assert [one.holds for one in hypotheses] == [True] * 4
    assert hypotheses[1].p_value == 2**-20 and hypotheses[2].p_value == 2**-10  # every seed is better
    assert hypotheses[1].corrected == 3 * 2**-20 and hypotheses[2].corrected == 2**-10  # Holm: times 3, 2 and 1
    assert hypotheses[1].tests[0].rates == (1e-3, 1e-3) and hypotheses[2].tests[0].rates == (1e-4, 1e-4)
    assert hypotheses[1].tests[0].estimate.mean == pytest.approx(0.15)


def test_second_part_that_loses_in_one_regime_does_not_confirm_it() -> None:
    worse = {**EQUAL, "bounded-penalty": [0.25, 0.6, 0.25]}
    first, second_one, _, _ = second_analysis.hypotheses(second_contests(b=worse))
    assert first.holds is False and second_one.holds is False


def test_second_part_is_open_until_all_its_runs_are_there() -> None:
    contests = second_contests()
    contests["second-b"].methods["clip"].runs[1e-4].pop(20)  # type: ignore[attr-defined]
    assert [one.holds for one in second_analysis.hypotheses(contests)] == [None, None, False, None]
    faster = {**EQUAL, "clip": [0.25, 0.3, 0.5]}
    contests = second_contests(a=faster)
    assert contests["second-a"].added_rates == {3e-3} and not contests["second-a"].complete


def test_page_shows_the_second_parts_runs_tests_and_differences(tmp_path: Path) -> None:
    better = {**EQUAL, "proximal": [0.25, 0.5, 0.4]}
    rows = {name: second_rows(name, better if name != "second-d" else EQUAL, chosen=1) for name in second.REGIMES}
    template = """{{second second-a}} {{second hypotheses}} {{figure second-robustness}} {{figure second-contrasts}}
        Ahead by {{second-a proximal - penalty @ 1e-3}}; the clip has {{second-d clip}}."""
    text, drawings = fill(rows, tmp_path, template)
    assert "*(a) 8 updates a rollout: 300 of 300 counted runs.*" in text
    assert "| KL penalty, bounded | 26.6 ± 1.3 (20) | 51.6 ± 1.3 (20) | 26.6 ± 1.3 (20) |" in text
    assert "| H1 | (a) | KL penalty | 3e-4 | +0.0 [+0.0, +0.0] | < 0.001 | < 0.001 | holds |" in text
    assert "| H2 | (a) | KL penalty | 1e-3 | +15.0 [+15.0, +15.0] | < 0.001 | < 0.001 | holds |" in text
    assert "| H2 | (b) | KL penalty, bounded | 3e-4 | +15.0 [+15.0, +15.0] | < 0.001 | – | – |" in text
    assert "| H3 | (d) | clip | 1e-4 | +0.0 [+0.0, +0.0] | 1.000 | 1.000 | not confirmed |" in text
    assert "Ahead by +15.0 points [+15.0, +15.0]; the clip has 51.7 [50.7, 52.7] %." in text
    assert [panel["title"][:3] for panel in drawings["second-robustness"].data] == ["(a)", "(b)", "(d)"]
    drawn = drawings["second-contrasts"].data
    assert len(drawn["rows"]) == 12 and {row["mean"] for row in drawn["rows"]} == {0.0}
    rows["second-b"] = [row for row in rows["second-b"] if (row.surrogate, row.seed) != ("clip", 20)]
    text, _ = fill(rows, tmp_path, "{{second second-b}} {{second hypotheses}} {{second-b clip}}")
    assert "297 of 300 counted runs; interim.*" in text and "| H1 | – | – | – | – | – | – | open |" in text
    assert text.endswith(" % (interim)")
    with pytest.raises(ValueError, match="'regression' is not a method"):
        fill(rows, tmp_path, "{{second-b regression}}")


def test_counted_runs_of_the_second_part_are_in_the_chosen_configuration() -> None:
    rows = second_rows("second-d", EQUAL, chosen=1)
    other = [row for row in second_rows("second-d", EQUAL, chosen=0) if row.phase == "counted"]
    with pytest.raises(ValueError, match="second-d: a counted run of clip with seed 20 has a configuration that the"):
        second_analysis.contest("second-d", [*rows, *(row for row in other if row.surrogate == "clip")])
    counted = next(row for row in rows if row.phase == "counted")
    with pytest.raises(ValueError, match=r"second-d: counted runs at 0\.001, which the protocol adds only when"):
        second_analysis.contest("second-d", [*rows, replace(counted, learning_rate=1e-3)])


def test_a_run_keeps_what_it_counts_for_and_is_named_once(tmp_path: Path) -> None:
    one, same = run_folder(tmp_path / "one"), run_folder(tmp_path / "same")
    with pytest.raises(ValueError, match=r"one and .*same are the same run: name one of them only"):
        collect([one, same], tmp_path / "new.csv", phase="counted")
    collect([one], tmp_path / "new.csv", phase="counted")
    with pytest.raises(ValueError, match=r"same is in .*new\.csv as a counted run: collect it as such"):
        collect([same], tmp_path / "new.csv", phase="exploratory")
    assert table.read_csv(tmp_path / "new.csv")[0].phase == "counted"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "my-own"}, "my-own is neither a recipe of the package nor in .*recipes"),
        ({"rollouts": 3}, "in 2 lines for 3 rollouts: set logging_steps"),
        ({"settings": {"per_device_train_batch_size": 3}}, "is not a share of 24 completions"),
        ({"success_after": 0.75}, "is not the success_after of summary.json"),
        ({"success_after_step": 8}, "is of step 16, not of the last evaluation"),
        ({"success_after": None}, "has no success_after"),
        ({"surrogate_settings": None}, "has no surrogate_settings"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = run_folder(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        collect([run], tmp_path / "new.csv", phase="exploratory")
    assert not (tmp_path / "new.csv").exists()


def test_a_run_without_verdicts_has_its_success_only(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "verdicts.json").unlink()
    collect([run], tmp_path / "new.csv", phase="counted")
    (row,) = table.read_csv(tmp_path / "new.csv")
    assert (row.eval_size, row.success_after, row.verdicts, row.questions) == (4, 0.5, "", "")


# The analysis.


def test_methods_are_compared_at_their_own_rates(tmp_path: Path) -> None:
    rows = study(tmp_path)
    section = analysis.primary_sections({"one": rows}, tmp_path)[REGIME]
    troll, clip = section.methods
    assert [method.label for method in section.methods] == ["TROLL", "clip"]
    assert {run.learning_rate for run in troll.tuned.values()} == {3e-4}
    assert {run.learning_rate for run in clip.tuned.values()} == {1e-4}
    (contrast,) = section.contrasts
    differences = [troll.tuned[seed].success_after - clip.tuned[seed].success_after for seed in range(4)]
    assert contrast.estimate.mean == pytest.approx(fmean(differences))
    test = stats.permutation_test((np.array(differences),), np.mean, permutation_type="samples", vectorized=True)
    assert contrast.p_value == pytest.approx(test.pvalue)
    assert contrast.corrected == pytest.approx(min(1.0, 9 * contrast.p_value)), "Holm over nine, eight to come"
    verdicts = np.stack([troll.tuned[seed].successes * 1 - clip.tuned[seed].successes for seed in range(4)])
    assert contrast.bootstrap == crossed_bootstrap_interval(verdicts, np.arange(DRAWS) // 2)
    assert section.fast_rate == 3e-4 and section.seeds == 4


def test_missing_verdicts_leave_out_one_interval_and_differing_questions_are_refused(tmp_path: Path) -> None:
    rows = study(tmp_path)
    without = [replace(row, questions="", verdicts="") if row.seed == 0 else row for row in rows]
    (contrast,) = analysis.primary_sections({"one": without}, tmp_path)[REGIME].contrasts
    assert contrast.bootstrap is None and contrast.estimate.interval is not None
    other = [replace(row, questions="other") if row.seed == 0 else row for row in rows]
    with pytest.raises(ValueError, match="sparse-signal: runs answer different questions"):
        analysis.primary_sections({"one": other}, tmp_path)


def test_counted_runs_of_a_method_have_one_setting_and_are_counted_once(tmp_path: Path) -> None:
    rows = study(tmp_path)
    ablation = replace(rows[0], settings=(("kl_bound", "0.2"),))
    with pytest.raises(ValueError, match=r"troll differ in their settings \(TROLL kl_bound=0.05\)"):
        analysis.primary_sections({"one": [*rows, ablation]}, tmp_path)
    found = analysis.primary_sections({"one": rows, "two": [replace(ablation, phase="exploratory")]}, tmp_path)
    assert found[REGIME].size == len(rows)
    with pytest.raises(ValueError, match="troll at 1e-4 with seed 0 is in two tables"):
        analysis.primary_sections({"one": rows, "two": rows[:1]}, tmp_path)


@pytest.mark.parametrize(
    ("mean", "corrected", "equivalence", "verdict"),
    [
        (0.1, 0.01, 0.9, "better"),
        (-0.1, 0.01, 0.9, "worse"),
        (0.02, 0.01, 0.01, "better, by less than 5 points"),
        (0.02, 0.3, 0.01, "equivalent within 5 points"),
        (0.1, 0.3, 0.9, "undecided"),
        (0.1, None, None, "undecided"),
    ],
)
def test_verdicts(mean: float, corrected: float | None, equivalence: float | None, verdict: str) -> None:
    estimate = SeedMean(mean, 0.1, 20, None, "t")
    method = analysis.Method("troll", (), "TROLL", {})
    found = analysis.Contrast(method, method, estimate, 0.5, equivalence, corrected)
    assert found.verdict == verdict


def test_the_bound_is_the_best_of_complete_tuning_runs(tmp_path: Path) -> None:
    means = {0.01: (0.2, 0.4), 0.05: (0.5, 0.1), 0.2: (0.0, 0.6)}  # two are equal over both rates
    tuning = [
        result("troll", rate, seed, mean, settings=(("kl_bound", str(bound)),), phase="tuning")
        for bound, by_rate in means.items()
        for rate, mean in zip(TUNING_RATES, by_rate, strict=True)
        for seed in TUNING_SEEDS
    ]
    section = analysis.primary_sections({"one": tuning}, tmp_path)[REGIME]
    assert {name: method.bound for name, method in section.chosen.items()} == {"troll": 0.01}
    assert [line.endswith("| yes |") for line in tables.tuning(section).splitlines()[2:]] == [True, False, False]
    assert not analysis.primary_sections({"one": tuning[1:]}, tmp_path)[REGIME].chosen
    with pytest.raises(ValueError, match=r"the bound of troll is 0\.05 in the counted runs, .* chose 0\.01"):
        analysis.primary_sections({"one": [*tuning, *study(tmp_path)]}, tmp_path)


def test_seeds_are_those_that_all_methods_have(tmp_path: Path) -> None:
    seeds = {"troll": range(4), "clip": range(2, 6)}
    rows = [row for row in study(tmp_path, seeds=6) if row.seed in seeds[row.surrogate]]
    assert analysis.primary_sections({"one": rows}, tmp_path)[REGIME].seeds == 2


# The page.

TEMPLATE = """\
Prose {{sparse-signal
troll - clip}} and {{sparse-signal troll}}.
{{contrasts}}
{{figure contrasts}}
{{figure robustness}}
{{fast}}
{{regime sparse-signal}}
{{regime sparse-signal-resampled}}
{{data}}
"""


def fill(rows: dict[str, list[Result]], folder: Path, template: str) -> tuple[str, dict[str, figures.Drawing]]:
    """One page's text, and its figures."""
    pages = page.build(rows, folder, {"page": template})
    return pages.texts["page"], pages.figures


def test_page_of_a_part_of_the_study(tmp_path: Path) -> None:
    rows = study(tmp_path)
    tuned = [replace(rows[0], seed=100 + i, phase="tuning", settings=(("kl_bound", str(i)),)) for i in (1, 2)]
    write(tmp_path, "primary", [*rows, replace(tuned[0], success_after=0.9), tuned[1]])
    (tmp_path / "primary.txt").write_text("troll compare sparse-signal --seeds 4\n")
    text, drawings = fill(page.read_tables(tmp_path), tmp_path, TEMPLATE)
    (contrast,) = analysis.primary_sections({"one": rows}, tmp_path)[REGIME].contrasts
    difference = f"{tables.points(contrast.estimate.mean)} points {tables.interval(contrast.estimate.interval)}"
    assert text.startswith(f"Prose {difference} (interim) and ")
    assert "*Interim: 16 of 400 counted runs; 0 of 20 seeds can be compared for all methods. The bounds" in text
    assert "*No counted runs yet.*" in text
    assert "| TROLL kl_bound=1 | 90.0 (1) | – | 90.0 |  |" in text
    assert "| [primary.csv](../results/primary.csv) | `sparse-signal` | 16 counted |" in text
    assert "```\ntroll compare sparse-signal --seeds 4\n```" in text
    assert set(drawings) == {"contrasts", "robustness", REGIME}
    cells = [line for line in text.splitlines() if line.startswith("| (a) (interim) | 3e-4")]
    assert len(cells) == 1 and cells[0].count("(4)") == 1 and cells[0].endswith("] | – | – |")
    assert text.count("<!-- from the tables: ") == text.count("<!-- end -->") == 7


def whole_regime(best_of_clip: float) -> list[Result]:
    """All planned runs of a regime, in which every method but the clip is best at 1e-4."""
    return [
        result(name, rate, seed, 0.5 if rate == (best_of_clip if name == "clip" else 1e-4) else 0.25)
        for name in METHODS
        for rate in LEARNING_RATES
        for seed in range(20)
    ]


REGIME_TEMPLATE = "{{regime sparse-signal}} {{contrasts}} {{sparse-signal troll - clip}}."


def test_a_regime_is_complete_with_all_methods_rates_and_seeds(tmp_path: Path) -> None:
    rows = whole_regime(best_of_clip=1e-4)
    text = fill({"one": rows}, tmp_path, REGIME_TEMPLATE)[0]
    assert "*All 400 counted runs. The bounds of TROLL, KL penalty, pull only, clip were not chosen by" in text
    assert "interim" not in text
    # The clip is best at the end of the rates.
    text = fill({"one": whole_regime(best_of_clip=1e-3)}, tmp_path, REGIME_TEMPLATE)[0]
    assert "*Interim: 400 of 500 counted runs; 20 of 20 seeds" in text and "so 3e-3 was added for all.*" in text
    assert "equivalent" not in text and "| interim |" in text and text.endswith("points [+0.0, +0.0] (interim).")
    with pytest.raises(ValueError, match="sparse-signal: counted runs at 1e-5, which the protocol adds only when"):
        fill({"one": [*rows, result("clip", 1e-5, 0, 0.25)]}, tmp_path, REGIME_TEMPLATE)


def changed(rows: list[Result], surrogate: str, rate: float, success: float) -> list[Result]:
    """With another success of one method at one rate."""
    return [
        replace(r, success_after=success) if (r.surrogate, r.learning_rate) == (surrogate, rate) else r for r in rows
    ]


def answers(tmp_path: Path, rows: list[Result]) -> tuple[bool, bool, bool, bool] | None:
    return analysis.primary_sections({"one": rows}, tmp_path)[REGIME].hypotheses


def test_hypotheses_of_one_regime(tmp_path: Path) -> None:
    rows = whole_regime(best_of_clip=1e-4)
    assert answers(tmp_path, rows) == (True, False, True, True)  # all methods are the same
    assert answers(tmp_path, changed(rows, "clip", 3e-4, 0.0)) == (True, True, True, True)
    assert answers(tmp_path, changed(rows, "clip", 1e-4, 0.4)) == (False, False, True, True)
    assert answers(tmp_path, changed(rows, "regression", 1e-4, 0.4)) == (True, False, False, True)
    assert answers(tmp_path, changed(rows, "kl_penalty", 1e-4, 0.4)) == (True, False, True, False)
    assert answers(tmp_path, changed(rows, "kl_penalty", 1e-4, 0.6)) == (True, False, True, True)
    # Ahead at the fast rate, but not over a wider range: TROLL's is the narrower one.
    narrow = changed(changed(rows, "troll", 3e-5, 0.0), "clip", 3e-4, 0.2)
    assert answers(tmp_path, narrow) == (True, False, True, True)
    assert answers(tmp_path, rows[1:]) is None and answers(tmp_path, []) is None


@pytest.mark.parametrize(("resampled", "answer"), [(0.0, False), (0.2, True)])
def test_the_fourth_hypothesis_compares_two_regimes(tmp_path: Path, resampled: float, answer: bool) -> None:
    rows = changed(whole_regime(best_of_clip=1e-4), "clip", 3e-4, 0.0)
    others = [replace(row, regime="sparse-signal-resampled") for row in changed(rows, "clip", 3e-4, resampled)]
    sections = analysis.primary_sections({"one": rows, "two": others}, tmp_path)
    assert analysis.lead_shrinks(sections) is answer
    text = fill({"one": rows, "two": others}, tmp_path, "{{hypotheses}}")[0]
    assert "| 1. Tuned, TROLL and the clip are equal | holds | – | holds |" in text
    assert text.splitlines()[-3].endswith(f"| – | – | {'holds' if answer else 'not confirmed'} |")
    assert analysis.lead_shrinks(analysis.primary_sections({"one": rows}, tmp_path)) is None


def test_what_never_succeeded_has_no_range_of_rates(tmp_path: Path) -> None:
    rows = [result("troll", rate, seed, 0.0) for rate in LEARNING_RATES for seed in range(2)]
    section = analysis.primary_sections({"one": rows}, tmp_path)[REGIME]
    assert tables.secondary(section).splitlines()[2].startswith("| TROLL | – | – | 2 of 2 |")


def test_exploration_without_troll_has_nothing_to_subtract(tmp_path: Path) -> None:
    rivals = [row for row in study(tmp_path, phase="exploratory") if row.surrogate != "troll"]
    assert "|  | 1e-4 | 3e-4 |\n" in fill({"rivals": rivals}, tmp_path, "{{exploratory rivals}}")[0]


def test_page_without_any_run(tmp_path: Path) -> None:
    text, drawings = fill({}, tmp_path, TEMPLATE + "{{changes}} {{tabular}} {{sparse-signal troll - clip @ 3e-4}}")
    assert text.count("Nothing to show yet.") == 7 and text.endswith(" (no runs yet)")
    assert drawings == {} and text.startswith("Prose (no runs yet) and (no runs yet).")


@pytest.mark.parametrize(
    ("placeholder", "message"),
    [
        ("regime spars", "asks for {{regime spars}}, which is unknown"),
        ("exploratory", "asks for {{exploratory}}, which is unknown"),
        (f"{REGIME} trol", "'trol' is not a method"),
    ],
)
def test_a_mistake_in_the_template_is_named(tmp_path: Path, placeholder: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        fill({}, tmp_path, f"{{{{{placeholder}}}}}")


def test_exploration_that_the_template_does_not_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no template shows the exploratory runs of rivals: add"):
        fill({"rivals": study(tmp_path, phase="exploratory")}, tmp_path, "Prose.")


# Figures.


def test_figures_are_the_same_bytes_again(tmp_path: Path) -> None:
    write(tmp_path, "primary", study(tmp_path))
    written = []
    for place in ("one", "two"):
        page.write_pages(tmp_path, tmp_path / place)
        files = sorted((tmp_path / place).rglob("*.*"))
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    assert set(written[0]) == {f"{name}.md" for name in page.read_templates()} | {
        f"{name}.{kind}" for name in ("contrasts", "robustness", REGIME) for kind in ("svg", "png")
    }


def test_lines_are_drawn_where_the_data_are(tmp_path: Path) -> None:
    section = analysis.primary_sections({"one": study(tmp_path)}, tmp_path)[REGIME]
    data = figures.rate_data("", section.methods)
    axes = figures.draw_rates([data]).axes[0]
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
        line["mean"] for line in data["lines"].values()
    ]
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["TROLL", "clip"]


def test_seeds_are_drawn_where_the_data_are(tmp_path: Path) -> None:
    """In the row of their method, with a bar at their mean, and a colour for each rate that the legend names."""
    sections = analysis.exploratory_sections({"one": study(tmp_path, phase="exploratory")})["one"]
    drawing = figures.seeds(sections)
    figure = drawing.draw(drawing.data)
    axes, (legend,) = figure.axes[0], figure.legends
    dots, bars = axes.lines[::2], axes.lines[1::2]
    rows = {(row["method"], row["rate"]): row["success"] for row in drawing.data}
    assert [np.asarray(line.get_xdata()).tolist() for line in dots] == list(rows.values())
    means = [fmean(finals) for finals in rows.values()]
    assert [np.asarray(line.get_xdata())[0] for line in bars] == pytest.approx(means)
    ticks = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    drawn = [ticks[min(ticks, key=lambda y: abs(y - np.asarray(line.get_ydata())[0]))] for line in dots]
    assert drawn == [method for method, _ in rows]
    assert [text.get_text() for text in legend.get_texts()] == ["1e-4", "3e-4"]
    assert len({line.get_color() for line in dots}) == 2


def test_labels_at_one_height_are_moved_apart() -> None:
    found = figures._apart([0.5, 0.5, 0.0, 0.52], 0.1)
    assert found[2] == min(found) >= 0
    assert np.diff(sorted(found)).min() >= 0.1 - 1e-9


# The command.


def test_command_collects_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    run, csv = run_folder(tmp_path / "run"), tmp_path / "results" / "new.csv"
    monkeypatch.setattr(sys, "argv", ["results", "collect", str(run), "--output", str(csv), "--phase", "counted"])
    assert command.main() == 0
    assert "new.csv: 1 runs added or replaced; 0 are not finished" in capsys.readouterr().out
    assert table.read_csv(csv)[0].phase == "counted"
    monkeypatch.setattr(sys, "argv", ["results", "collect", str(tmp_path / "none"), "--output", str(csv)])
    assert command.main() == 2
    assert re.search(r"error: .*none is neither a run folder", capsys.readouterr().err)
