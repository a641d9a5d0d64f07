from pathlib import Path

import pytest

from troll_lab.recipes import RecipeError
from troll_lab.runs.grid import PlannedRun, expand, parse_command


def plan(*command: str) -> list[PlannedRun]:
    recipes = [part for part in command if part in ("quickstart", "grpo", "ablation-kl-bound")]
    fields = list(command[len(recipes) :])
    return expand(recipes, parse_command(recipes, fields).axes)


def test_expand_multiplies_and_names_runs() -> None:
    runs = plan("quickstart", "grpo", "--learning_rate", "1e-5", "1e-4", "--seeds", "2", "--max_steps", "8")
    assert [run.name for run in runs] == [
        f"{recipe}-learning_rate={rate}-seed={seed}"
        for seed in (0, 1)
        for recipe in ("quickstart", "grpo")
        for rate in ("1e-5", "1e-4")
    ]
    training = runs[-1].recipe.training
    assert (training.learning_rate, training.seed, training.max_steps) == (1e-4, 1, 8)
    assert runs[-1].overrides == ("--learning_rate=1e-4", "--max_steps=8", "--seed=1")


def test_expand_multiplies_no_runs_by_a_setting_that_is_not_read() -> None:
    runs = plan("quickstart", "--kl_bound", "0.01", "0.05", "--surrogate", "troll", "clip", "none", "--epsilon", "0.1")
    points = ["troll-kl_bound=0.01", "troll-kl_bound=0.05", "clip", "none"]
    assert [run.name for run in runs] == [f"quickstart-{point}" for point in points]
    assert runs[2].recipe.training.epsilon == 0.1
    assert runs[0].recipe.training.epsilon is None, "TROLL would warn that it ignores the clip's range"
    runs = plan("quickstart", "--surrogate", "troll", "clip", "--delta", "3")
    assert [run.recipe.training.delta for run in runs] == [None, 3.0], "TROLL would refuse it"


def test_expand_varies_the_measured_support_where_a_kl_is_measured() -> None:
    """A KL target's KL is on it, with any surrogate."""
    command = ("quickstart", "--surrogate", "troll", "clip", "--support_top_k", "8", "16")
    for constant in (("--kl_target", "null", "--learning_rate", "1e-4"), ("--learning_rate", "1e-4")):
        assert len(plan(*command, *constant)) == 3
    runs = plan(*command)
    found = [(run.recipe.training.surrogate, run.recipe.training.support_top_k) for run in runs]
    assert found == [("troll", 8), ("troll", 16), ("clip", 8), ("clip", 16)]


def test_expand_multiplies_no_runs_by_a_setting_of_the_surrogate() -> None:
    runs = plan("quickstart", "--surrogate", "troll", "cispo", "--loss_type", "bnpo", "dapo")
    points = ["troll-loss_type=bnpo", "troll-loss_type=dapo", "cispo"]
    assert [run.name for run in runs] == [f"quickstart-{point}" for point in points]
    assert [run.recipe.training.loss_type for run in runs] == ["bnpo", "dapo", "cispo"]


def test_the_grid_of_a_recipe_and_what_wins_over_it() -> None:
    assert [run.recipe.training.kl_bound for run in plan("ablation-kl-bound")] == [0.01, 0.05, 0.25]
    assert [run.recipe.training.kl_bound for run in plan("ablation-kl-bound", "--kl_bound", "0.1", "0.2")] == [0.1, 0.2]
    clip = [run for run in plan("ablation-kl-bound", "--surrogate", "troll", "clip") if "clip" in run.name]
    assert [run.name for run in clip] == ["ablation-kl-bound-clip"]


def test_one_point_is_one_run_of_the_recipes_name() -> None:
    (run,) = plan("quickstart", "--use_cpu", "--entropy_coef=-1e-3")
    assert (run.name, run.overrides) == ("quickstart", ("--entropy_coef=-1e-3", "--use_cpu"))
    assert run.settings["entropy_coef"] == -1e-3
    assert "output_dir" not in run.settings


def test_names_are_folders_and_unique(tmp_path: Path) -> None:
    options = ['{"max_terms": 3}', '{"max_terms":-3}']
    runs = plan("quickstart", "--task_options", *options)
    assert len({run.name for run in runs}) == 2
    assert not any(set(run.name) & set("/ {}\"'") for run in runs)
    (tmp_path / "grpo.yaml").write_text("extends: quickstart\nbeta: 0.1\n")
    assert len({run.name for run in expand([str(tmp_path / "grpo.yaml"), "grpo"], {})}) == 2
    (tmp_path / "mine.yaml").write_text("extends: quickstart\noutput_dir: elsewhere\n")
    with pytest.raises(RecipeError, match="quickstart and mine are the same run"):
        expand(["quickstart", str(tmp_path / "mine.yaml")], {})


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["quikstart"], "did you mean quickstart"),
        (["quickstart", "--kl_bound", "0.1", "-1"], "kl_bound must be above 0, got -1.0"),
        (["quickstart", "--learing_rate", "1", "2"], "did you mean --learning_rate"),
        (["quickstart", "--seeds", "0"], "--seeds takes one whole number above 0, got 0"),
        (["quickstart", "--seeds", "2", "--seed", "1"], "give one of the two"),
        (["quickstart", "--jobs", "1", "2"], "--jobs takes one whole number above 0, got 1 2"),
        (["quickstart", "--kl_bound", "1", "--kl-bound", "2"], "--kl_bound is given twice"),
        (["quickstart", "--output_dir", "a", "b"], "--output_dir takes one folder, got a b"),
        (["quickstart", "--resume_from_checkpoint"], "a comparison resumes by itself"),
        (["quickstart", "--reward_weights", "1.0", "0.5"], "--reward_weights takes a list.* write it in a recipe"),
        (["quickstart", "--kl_bound", "0.1", "0.10"], "kl_bound=0.1 and quickstart-kl_bound=0.10 are the same run"),
    ],
)
def test_mistakes_are_one_line(command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        expand(command[:1], parse_command(command[:1], command[1:]).axes)
    assert isinstance(error.value, RecipeError)
    assert "\n" not in str(error.value)


def test_the_order_of_the_command_does_not_change_names() -> None:
    fields = [["--surrogate", "troll", "clip"], ["--seeds", "2"], ["--learning_rate", "1e-5", "1e-4"], ["--beta", "0"]]
    one = plan("quickstart", *(part for field in fields for part in field))
    other = plan("quickstart", *(part for field in reversed(fields) for part in field))
    assert [run.name for run in one] == [run.name for run in other]
    assert one[0].name == "quickstart-troll-learning_rate=1e-5-seed=0"


def test_parse_command_names_the_folder_after_the_recipes() -> None:
    assert parse_command(["quickstart", "some/grpo.yaml"], []).output_dir == "runs/compare-quickstart-grpo"
    assert parse_command(["some/run/config.yaml"], []).output_dir == "runs/compare-run"
    command = parse_command(["quickstart"], ["--output_dir", "here", "--jobs=3"])
    assert (command.output_dir, command.jobs, command.axes) == ("here", 3, {})
