import json
from pathlib import Path
from typing import Any

import pytest

from experiments.tuning import Tuning, tune
from tests.troll_lab.runs.test_compare import WORKER, console, grid, how, starts, text_of  # noqa: F401  two are fixtures
from troll_lab.recipes import RecipeError
from troll_lab.runs import slots, worker
from troll_lab.runs.compare import compare
from troll_lab.runs.grid import PlannedRun, parse_command

BOUNDS = ["--tune", "kl_bound=0.2,0.05", "epsilon=0.3,0.1", "learning_rate=1e-4,3e-4", "--tuning_seeds", "8", "9"]


def plan(*arguments: str, recipes: tuple[str, ...] = ("quickstart",)) -> Tuning:
    return Tuning.parse(recipes, parse_command(recipes, arguments).axes)


def values(runs: list[PlannedRun], *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(run.recipe.training, name) for name in names) for run in runs]


def test_choose_takes_the_best_mean_and_of_equals_the_smaller() -> None:
    tuning = plan("--surrogate", "troll", "clip", "none", *BOUNDS, "--seeds", "3")
    runs = tuning.runs()
    best = [run.name for run in runs if "epsilon=0.3-learning_rate=3e-4" in run.name]
    lucky = next(run.name for run in runs if "epsilon=0.1-learning_rate=3e-4" in run.name)
    results = {run.name: 0.5 for run in runs} | dict.fromkeys(best, 0.6) | {lucky: 0.65}
    troll, clip, none = tuning.choose(runs, results)
    assert troll.values == {"kl_bound": "0.05", "learning_rate": "1e-4"}
    assert clip.values == {"epsilon": "0.3", "learning_rate": "3e-4"}
    assert none.values == {"learning_rate": "1e-4"}
    assert [mean for _, mean in clip.means] == pytest.approx([0.6, 0.575, 0.5, 0.5])
    counted = tuning.counted([troll, clip, none])
    assert [run.name for run in counted if run.recipe.training.seed == 2] == [
        f"quickstart-{method}-seed=2" for method in ("troll", "clip", "none")
    ]
    assert values(counted[:2], "kl_bound", "epsilon", "learning_rate") == [(0.05, None, 1e-4), (0.05, 0.3, 3e-4)]


def test_counted_keeps_the_own_values_of_a_tuned_field() -> None:
    tuning = plan("--surrogate", "troll", "none", *BOUNDS, "--learning_rate", "1e-5", "1e-3", "--seeds", "1")
    runs = tuning.runs()
    assert {run.recipe.training.surrogate for run in runs} == {"troll"}, "none has nothing that could be chosen"
    counted = tuning.counted(tuning.choose(runs, {run.name: run.recipe.training.kl_bound for run in runs}))
    found = values(counted, "surrogate", "kl_bound", "learning_rate")
    assert found[:2] == [("troll", 0.2, 1e-5), ("troll", 0.2, 1e-3)]
    assert [name for name, _, _ in found] == ["troll", "troll", "none", "none"]


def test_parse_takes_values_from_the_option_of_a_field() -> None:
    one = plan("--tune", "kl_bound=0.1,0.2", "--tuning_seeds", "9")
    other = plan("--tune", "kl_bound", "--kl_bound", "0.1", "0.2", "--tuning_seeds", "9")
    assert one == other


def test_choose_is_made_for_each_recipe_and_other_axis() -> None:
    tuning = plan(
        *("--tune", "kl_bound=0.1,0.2", "--tuning_seeds", "9", "--max_steps", "8", "16"), recipes=("quickstart", "grpo")
    )
    runs = tuning.runs()
    results = {run.name: float((run.recipe.name == "grpo") == (run.recipe.training.kl_bound == 0.2)) for run in runs}
    choices = tuning.choose(runs, results)
    assert [(choice.recipe, choice.values["kl_bound"]) for choice in choices] == [
        *[("quickstart", "0.1")] * 2,
        *[("grpo", "0.2")] * 2,
    ]
    assert choices[0].as_json()["settings"] == {"max_steps": "8"}
    assert values(tuning.counted(choices), "max_steps", "kl_bound") == [(8, 0.1), (16, 0.1), (8, 0.2), (16, 0.2)]


ONE = ["--tune", "kl_bound=0.1,0.2", "--tuning_seeds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tune", "kl_bound=1,2"], "--tune .* and --tuning_seeds .* go together"),
        (["--tuning_seeds", "1"], "--tune .* and --tuning_seeds .* go together"),
        (["--tune", "kl_bound=1", "--tuning_seeds", "1"], "--tune kl_bound needs values to choose from"),
        (["--tune", "kl_bound", "--tuning_seeds", "1"], "--tune kl_bound needs values to choose from"),
        (["--tune", "kl_bound=1,2", "kl-bound=3,4", "--tuning_seeds", "1"], "--tune has kl_bound twice"),
        (["--tune", "seed=1,2", "--tuning_seeds", "1"], "--tune seed: a comparison is over the seeds"),
        (["--tune", "kl_bond=0.1,0.2", "--tuning_seeds", "9"], "did you mean --kl_bound"),
        ([*BOUNDS, "--learning_rate", "fast", "slow"], "learning_rate"),
        (["--tune", "epsilon=1,2", "--tuning_seeds", "9", "--epsilon", "1", "2"], "--tune epsilon chooses nothing"),
        ([*BOUNDS, "--seeds", "10"], "seed 8 is a tuning seed and a counted one"),
        ([*BOUNDS, "--seed", "9"], "seed 9 is a tuning seed and a counted one"),
        ([*ONE, "0"], "seed 0 is a tuning seed"),  # the recipe's own
    ],
)
def test_mistakes_in_either_stage_are_named_before_any_run(options: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        plan(*options).runs()
    assert "\n" not in str(raised.value)


TUNE = ["--surrogate", "troll", "clip", "--tune", "kl_bound=0.2,0.01", "epsilon=0.1,0.3", "learning_rate=1e-5,1e-4"]
TUNE += ["--tuning_seeds", "7", "8", "--learning_rate", "1e-4", "1e-3", "--seeds", "2", "--jobs", "2"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_tune_compares_methods_with_their_chosen_settings(tmp_path, how, console):  # noqa: F811
    folder = tmp_path / "all"
    command = [*TUNE, "--output_dir", str(folder)]
    how["quickstart-troll-kl_bound=0.01-learning_rate=1e-5-seed=8"] = "reach=0.9"
    how["quickstart-clip-epsilon=0.3-learning_rate=1e-4-seed=7"] = "fail"
    assert tune(["quickstart"], command, console) == "failed"
    assert len(read(folder / "tuning" / "compare.json")["runs"]) == 16
    assert not (folder / "counted").exists(), "nothing is chosen yet"

    how["quickstart-clip-epsilon=0.3-learning_rate=1e-4-seed=7"] = "reach=0.8"
    for _ in range(2):  # the second time, nothing is left to be done
        assert tune(["quickstart"], command, console) == "finished"
    chosen = {choice["surrogate"]: choice for choice in read(folder / "tuning.json")}
    assert chosen["troll"]["chosen"] == {"kl_bound": "0.01", "learning_rate": "1e-5"}
    assert chosen["troll"]["means"][0]["mean"] == pytest.approx(0.7)
    assert [len(choice["means"]) for choice in chosen.values()] == [4, 4]
    counted = read(folder / "counted" / "compare.json")["runs"]
    assert {(run["surrogate"], run["learning_rate"], run["seed"]) for run in counted.values()} == {
        (surrogate, rate, seed) for surrogate in ("troll", "clip") for rate in (1e-4, 1e-3) for seed in (0, 1)
    }
    assert {run["kl_bound"] for run in counted.values() if run["surrogate"] == "troll"} == {0.01}
    assert {run["epsilon"] for run in counted.values() if run["surrogate"] == "clip"} == {0.3}
    assert all(len(starts(folder / "counted", name)) == 1 for name in counted)
    assert "chosen    quickstart clip: epsilon=0.3 learning_rate=1e-4 (mean 0.650)" in text_of(console)
    assert "16 runs, 16 finished already" in text_of(console)
    assert [len(method["success_by_seed"]) for method in read(folder / "contest.json")["methods"]] == [2, 2]
    assert (folder / "contest.html").is_file()

    with pytest.raises(RecipeError, match=r"its run quickstart-.* is not in this grid"):
        compare(grid(), folder / "tuning", console)
    more = ["kl_bound=0.2,0.01,0.5" if part.startswith("kl_bound") else part for part in command]
    how["quickstart-troll-kl_bound=0.5-learning_rate=1e-5-seed=7"] = "reach=1"
    how["quickstart-troll-kl_bound=0.5-learning_rate=1e-5-seed=8"] = "reach=1"
    with pytest.raises(RecipeError, match=r"its run quickstart-troll.* \(kl_bound is 0.01 there and 0.5 here\)"):
        tune(["quickstart"], more, console)


def test_tune_refuses_runs_that_measure_nothing(tmp_path, how, console, monkeypatch):  # noqa: F811
    monkeypatch.setattr(slots, "WORKER", [*slots.WORKER[:3], WORKER.replace("success_after", "other"), worker.__file__])
    with pytest.raises(RecipeError, match=r"quickstart-clip-.* has no held-out success after training"):
        tune(["quickstart"], [*TUNE, "--output_dir", str(tmp_path / "all")], console)
