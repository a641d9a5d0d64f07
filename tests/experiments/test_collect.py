"""From run folders to a table of the study, and what such a table says of a run."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl.trainer.utils import RepeatSampler

from experiments import RECIPES, grid, table
from experiments import __main__ as command
from experiments.collect import collect, identity_of
from experiments.table import Result
from tests.experiments.made import REGIME, result, run_folder
from troll.trl.surrogates import settings_read
from troll_lab import recipes
from troll_lab.runs.grid import PlannedRun, expand

RISING = (0, 20, 40, 60, 80, 80)


def test_merge_replaces_the_row_of_the_same_run() -> None:
    old, other = result("troll", 1e-4, 0, 0.5), result("troll", 1e-4, 1, 0.5)
    new = replace(old, success_after=0.75)
    assert table.merge([other, old], [new]) == [new, other]


@pytest.mark.parametrize(
    ("curve", "reached"), [(RISING, 6), ((50,) * 6, 5), ((60, 60), 2), ((100, 40, 40, 40, 20), None)]
)
def test_rollouts_to_half_are_those_of_the_running_mean(curve: tuple[int, ...], reached: int | None) -> None:
    assert result("troll", 1e-4, 0, 0.5, completions=100, curve=curve).rollouts_to_half == reached


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
def test_collapsed_run_has_lost_half_of_its_best(final: float, curve: tuple[int, ...], expected: bool) -> None:
    run = result("troll", 1e-4, 0, 0.5, completions=100, curve=curve, success_after=final)
    assert run.collapsed is expected


def test_successes_are_in_the_order_of_the_questions() -> None:
    order = list(RepeatSampler(range(9), mini_repeat_count=1, seed=5))
    evaluated = table.pack([int(row in (2, 7)) for row in order])
    row = result("troll", 1e-4, seed=5, success=0, verdicts=evaluated, eval_size=9)
    assert row.successes.nonzero()[0].tolist() == [2, 7]


@pytest.mark.parametrize("verdicts", [[1], [0, 1, 1, 0, 1, 0, 0, 0], [0, 0, 1] * 7])
def test_pack_loses_nothing(verdicts: list[int]) -> None:
    assert table.unpack(table.pack(verdicts), len(verdicts)).astype(int).tolist() == verdicts
    assert table.pack([1, 0, 0, 0, 0, 0, 0, 0, 1, 1]) == "80c0"  # bits from the left


def test_equal_lists_of_questions_have_one_name(tmp_path: Path) -> None:
    name = table.write_questions(tmp_path, [7, 3, 7])
    assert table.write_questions(tmp_path, [0, 1, 0]) == name != table.write_questions(tmp_path, [0, 1, 1])
    assert table.read_questions(tmp_path, name).tolist() == [0, 1, 0]


def test_read_csv_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv .* has no column collapsed"):
        table.read_csv(tmp_path / "other.csv")
    (tmp_path / "bad.csv").write_text(table.to_csv([result("troll", 1e-4, 0, 0.5, phase="guessed")]))
    with pytest.raises(ValueError, match=r"bad.csv, line 2: phase must be one of tuning, counted, exploratory"):
        table.read_csv(tmp_path / "bad.csv")


def test_collect_takes_what_the_folder_says(tmp_path: Path) -> None:
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
    (run / "verdicts.json").unlink()
    collect([run], csv, phase="exploratory")
    assert table.read_csv(csv) == [replace(row, verdicts="", questions="")]


def test_collect_refuses_verdicts_in_another_order_or_missing(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    order, path = table.evaluation_order(4, seed=0), run / "verdicts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row": order}))
    assert collect([run], tmp_path / "new.csv", phase="exploratory") == (1, 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row": order[::-1]}))
    with pytest.raises(ValueError, match="not in the order of an evaluation with seed 0"):
        collect([run], tmp_path / "new.csv", phase="exploratory")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row": order, "success": [1, None, 0, 1]}))
    with pytest.raises(ValueError, match="1 completions could not be judged"):
        collect([run], tmp_path / "new.csv", phase="exploratory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "my-own"}, "my-own is neither a recipe of the package nor in"),
        ({"rollouts": 3}, "set logging_steps"),
        ({"settings": {"per_device_train_batch_size": 3}}, "is not a share of 24 completions"),
        ({"success_after": 0.75}, "is not the success_after of summary.json"),
        ({"success_after_step": 8}, "is of step 16, not of the last evaluation"),
        ({"success_after": None}, "has no success_after"),
        ({"surrogate_settings": None}, "has no surrogate_settings"),
    ],
)
def test_collect_refuses_a_run_that_contradicts_itself(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = run_folder(tmp_path / "run", **changes)
    with pytest.raises(ValueError, match=message):
        collect([run], tmp_path / "new.csv", phase="exploratory")
    assert not (tmp_path / "new.csv").exists()


def test_collect_keeps_the_phase_and_refuses_a_run_named_twice(tmp_path: Path) -> None:
    one, same = run_folder(tmp_path / "one"), run_folder(tmp_path / "same")
    with pytest.raises(ValueError, match=r"one and .*same are the same run"):
        collect([one, same], tmp_path / "new.csv", phase="counted")
    collect([one], tmp_path / "new.csv", phase="counted")
    with pytest.raises(ValueError, match=r"same is in .*new\.csv as a counted run"):
        collect([same], tmp_path / "new.csv", phase="exploratory")
    assert table.read_csv(tmp_path / "new.csv")[0].phase == "counted"


def test_collect_of_a_comparison_again_changes_nothing(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("target", "rates"), [(0.03, (1.235e-5, 1e-4)), (None, ())])
def test_collect_takes_rates_that_follow_a_target(
    tmp_path: Path, target: float | None, rates: tuple[float, ...]
) -> None:
    collect([run_folder(tmp_path / "run", settings={"kl_target": target})], tmp_path / "new.csv", phase="exploratory")
    (row,) = table.read_csv(tmp_path / "new.csv")
    assert row.rates == rates and ("kl_target" in dict(row.settings)) == (target is not None)
    assert ("rates" in (tmp_path / "new.csv").read_text().splitlines()[0]) == (target is not None)


@pytest.mark.parametrize("surrogate", ["troll", "clip"])
def test_a_row_names_the_target_that_its_recipe_has(surrogate: str) -> None:
    target = recipes.load("quickstart").training.kl_target
    assert target is not None
    found, rates = [], {"learning_rate": ["1e-4"]}
    for fields in ({}, rates, {**rates, "kl_target": [str(target)]}, {**rates, "kl_target": ["null"]}):
        (run,) = expand(["quickstart"], {"surrogate": [surrogate], **fields})
        found.append(dict(identity_of(run)[3]).get("kl_target"))
    assert found == [str(target), None, str(target), None]


@pytest.mark.parametrize("surrogate", ["troll", "kl_penalty", "clip"])
def test_missing_names_planned_runs_that_no_table_has(tmp_path: Path, surrogate: str) -> None:
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


@pytest.mark.parametrize(
    "change", [{"eval_size": ["64"]}, {"max_completion_length": ["none"]}, {"support_top_k": ["8"]}]
)
def test_missing_names_a_run_that_differs_in_any_setting(tmp_path: Path, change: dict[str, list[str]]) -> None:
    """Also one that only the KL of a target reads, with the clip."""
    axes = {"surrogate": ["clip"], "learning_rate": ["3e-4"], "kl_target": ["0.03"], "seed": ["0"]}
    (run,), (other,) = (expand([str(RECIPES / f"{REGIME}.yaml")], axes | more) for more in ({}, change))
    read = settings_read(run.recipe.training)
    folder = run_folder(tmp_path / "runs" / run.name, "clip", surrogate_settings=read)
    (folder / "config.yaml").write_text(yaml.safe_dump({**run.settings, "output_dir": str(folder)}))
    collect([folder], tmp_path / "results.csv", phase="exploratory")
    assert grid.missing([run, other], tmp_path / "results.csv", tmp_path / "elsewhere") == [other]


def test_run_adds_what_a_table_lacks_even_if_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def make(seed: str, folder: str) -> tuple[str, int]:
        axes = "--surrogate clip --epsilon 0.1 0.3 --learning_rate 3e-4 --output_dir"
        fields = [*axes.split(), str(tmp_path / folder), "--seed", seed]
        return grid.run(csv, [str(RECIPES / f"{REGIME}.yaml")], fields)

    monkeypatch.setattr(grid, "compare", compare)
    csv = tmp_path / "results.csv"
    made = [make(seed, f"again-{number}") for number, seed in enumerate(("0", "1", "0"))]
    assert made == [("interrupted", 1)] * 3 and asked == [[0, 0], [1, 1], [0]]
    found = [(row.seed, dict(row.settings)["epsilon"]) for row in table.read_csv(csv)]
    assert found == [(0, "0.1"), (1, "0.1"), (0, "0.3")]
    assert make("0", "again") == ("finished", 0)


def test_command_collects_and_names_what_is_wrong(tmp_path, monkeypatch, capsys):
    run, csv = run_folder(tmp_path / "run"), tmp_path / "results" / "new.csv"
    monkeypatch.setattr(sys, "argv", ["results", "collect", str(run), "--output", str(csv), "--phase", "counted"])
    assert command.main() == 0
    assert "new.csv: 1 runs added or replaced; 0 are not finished" in capsys.readouterr().out
    assert table.read_csv(csv)[0].phase == "counted"
    monkeypatch.setattr(sys, "argv", ["results", "collect", str(tmp_path / "none"), "--output", str(csv)])
    assert command.main() == 2
    assert re.search(r"error: .*none is neither a run folder", capsys.readouterr().err)
