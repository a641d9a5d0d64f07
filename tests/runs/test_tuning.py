import pytest

from troll.recipes import RecipeError
from troll.runs.grid import PlannedRun, parse_command
from troll.runs.tuning import Tuning

BOUNDS = ["--tune", "kl_bound=0.2,0.05", "epsilon=0.3,0.1", "learning_rate=1e-4,3e-4", "--tuning_seeds", "8", "9"]


def plan(*arguments: str, recipes: tuple[str, ...] = ("quickstart",)) -> Tuning:
    command = parse_command(recipes, arguments)
    return Tuning(recipes, command.axes, command.tuned, command.tuning_seeds)


def values(runs: list[PlannedRun], *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(run.recipe.training, name) for name in names) for run in runs]


def test_each_method_tries_the_values_that_it_reads() -> None:
    tuning = plan("--surrogate", "troll", "clip", *BOUNDS, "--seeds", "1")
    runs = tuning.runs()
    troll, clip = ([run for run in runs if run.recipe.training.surrogate == name] for name in ("troll", "clip"))
    expected = [(bound, rate, seed) for seed in (8, 9) for bound in (0.2, 0.05) for rate in (1e-4, 3e-4)]
    assert values(troll, "kl_bound", "learning_rate", "seed") == expected
    expected = [(width, rate, seed) for seed in (8, 9) for width in (0.3, 0.1) for rate in (1e-4, 3e-4)]
    assert values(clip, "epsilon", "learning_rate", "seed") == expected
    assert runs[0].name == "tune-quickstart-troll-kl_bound=0.2-learning_rate=1e-4-seed=8"


def test_the_best_mean_is_chosen_and_of_equal_ones_the_smaller_values() -> None:
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
    assert values(counted[:2], "kl_bound", "epsilon", "learning_rate") == [(0.05, 0.2, 1e-4), (0.05, 0.3, 3e-4)]


def test_a_field_with_values_of_its_own_keeps_them_in_the_second_stage() -> None:
    tuning = plan("--surrogate", "troll", "none", *BOUNDS, "--learning_rate", "1e-5", "1e-3", "--seeds", "1")
    runs = tuning.runs()
    assert {run.recipe.training.surrogate for run in runs} == {"troll"}, "none has nothing that could be chosen"
    counted = tuning.counted(tuning.choose(runs, {run.name: run.recipe.training.kl_bound for run in runs}))
    found = values(counted, "surrogate", "kl_bound", "learning_rate")
    assert found[:2] == [("troll", 0.2, 1e-5), ("troll", 0.2, 1e-3)]
    assert [name for name, _, _ in found] == ["troll", "troll", "none", "none"]


def test_a_field_without_values_takes_those_of_its_option() -> None:
    one = plan("--tune", "kl_bound=0.1,0.2", "--tuning_seeds", "9")
    other = plan("--tune", "kl_bound", "--kl_bound", "0.1", "0.2", "--tuning_seeds", "9")
    assert one == other


def test_recipes_and_other_axes_have_choices_of_their_own() -> None:
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


def test_a_recipes_own_grid_can_be_tuned() -> None:
    tuning = plan(
        *("--surrogate", "troll", "clip", "--tune", "kl_bound=0.1,0.2", "--tuning_seeds", "9"),
        recipes=("ablation-kl-bound",),
    )
    runs = tuning.runs()
    counted = tuning.counted(tuning.choose(runs, {run.name: run.recipe.training.kl_bound for run in runs}))
    assert values(counted, "surrogate", "kl_bound")[0] == ("troll", 0.2)
    assert len(counted) == 2


def test_a_seed_is_not_chosen_on_and_counted() -> None:
    for seeds in (["--seeds", "10"], ["--seed", "9"]):
        with pytest.raises(RecipeError, match=r"seed [89] is a tuning seed and a counted one"):
            plan(*BOUNDS, *seeds).runs()
    with pytest.raises(RecipeError, match="seed 0 is a tuning seed"):  # the recipe's own
        plan("--tune", "kl_bound=0.1,0.2", "--tuning_seeds", "0").runs()


def test_mistakes_in_either_stage_are_found_first() -> None:
    with pytest.raises(RecipeError, match="did you mean --kl_bound"):
        plan("--tune", "kl_bond=0.1,0.2", "--tuning_seeds", "9").runs()
    with pytest.raises(RecipeError, match="learning_rate"):
        plan(*BOUNDS, "--learning_rate", "fast", "slow").runs()
    with pytest.raises(RecipeError, match="--tune learning_rate chooses nothing"):
        plan("--tune", "learning_rate=1,2", "--tuning_seeds", "9", "--learning_rate", "1e-4", "1e-5").runs()
