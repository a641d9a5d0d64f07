"""Recipes of movements, and the settings on top of them."""

from pathlib import Path

import pytest
import yaml

from troll_lab.episodic.config import EpisodicConfig, is_recipe, load, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name: str) -> None:
    assert is_recipe(name)
    assert load(name).output_dir == f"runs/{name}"


def test_overrides_replace_the_recipes_values() -> None:
    config = load("tce-reach", ["--mean_bound", "0.3", "--events", "episodes", "--processes", "--seed=4"])
    assert (config.mean_bound, config.events, config.processes, config.seed) == (0.3, "episodes", True, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--mean_bond", "1"], "unknown field 'mean_bond', did you mean mean_bound"),
        (["--events", "steps"], "events must be segments or episodes, got 'steps'"),
        (["--covariance_bound", "0"], "covariance_bound must be above 0, got 0.0"),
        (["--gae_decay", "1.1"], r"gae_decay must be in \[0, 1\], got 1.1"),
        (["--learning_rate", ".inf"], "learning_rate must be finite and above 0, got inf"),
        (["--max_grad_norm", "nan"], "max_grad_norm must be finite and above 0, got nan"),
        (["--pull_weight", "-1"], "pull_weight must be finite and at least 0, got -1.0"),
        (["--episodes", "65"], "episodes must be a multiple of num_envs=64, got 65"),
        (["--seed=-1"], r"seed must be an integer in \[0, 2\^32\), got -1"),
        (["--seed", "x"], "argument --seed: must be a whole number, got 'x'"),
        (["--processes", "perhaps"], "must be true or false, got perhaps"),
    ],
)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("tce-reach", overrides)


def test_files_of_a_user_are_read_as_the_command_line_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("environment: reach\nlearning_rate: 1e-3\ngae_decay: 0\niterations: 1e2\n")
    config = load(str(file), ["--clip", ".5"])
    assert (config.learning_rate, config.gae_decay, config.iterations, config.clip) == (1e-3, 0.0, 100, 0.5)
    file.write_text(yaml.safe_dump(config.settings()))
    assert is_recipe(str(file)) and load(str(file)) == config
    for line, message in (
        ("episodes: 64.5", "must be a whole number"),
        ("seed: null", "seed has no value"),
        ("kl_bound: 0.1", "unknown field 'kl_bound'"),
    ):
        file.write_text(f"environment: reach\n{line}\n")
        with pytest.raises(ValueError, match=message):
            load(str(file))
    for text in ("a: [", "task: gsm8k\n"):
        file.write_text(text)
        assert not is_recipe(str(file))
    assert not is_recipe("quickstart")


def test_defaults_are_the_papers_bounds_for_box_pushing() -> None:
    assert (EpisodicConfig().mean_bound, EpisodicConfig().covariance_bound) == (0.05, 5e-4)
