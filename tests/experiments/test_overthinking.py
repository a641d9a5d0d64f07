"""Rewards of tokens and a penalty on the length: docs/study/shorter-answers.md has what was measured."""

import json

import pytest

from experiments import overthinking
from experiments.rows import read_rows
from troll_lab import recipes
from troll_lab.runs.build import model_path

WARM_UP = {"max_steps": 2, "batch_size": 8, "num_questions": 64, "test_size": 8, "target_success": None}
TINY = ["--max_steps", "2", "--updates_per_rollout", "2", "--eval_steps", "2"]
TINY += ["--eval_size", "16", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "16"]


def test_page_has_the_table() -> None:
    page = (overthinking.RESULT.parents[1] / "study" / "shorter-answers.md").read_text()
    made = read_rows(overthinking.RESULT)
    weights = {recipe: overthinking.chosen(made, recipe) for recipe in overthinking.WEIGHTS}
    assert overthinking.outcome(made, weights, overthinking.SEEDS) in page


def test_table_has_every_seed_of_both_and_every_weight_was_tried() -> None:
    made = read_rows(overthinking.RESULT)
    for recipe, weights in overthinking.WEIGHTS.items():
        counted = (recipe, overthinking.chosen(made, recipe))
        seeds = {row["seed"] for row in made if (row["recipe"], row["weight"]) == counted}
        assert seeds == {overthinking.TUNING_SEED, *overthinking.SEEDS}
        tuned = [row for row in made if (row["recipe"], row["seed"]) == (recipe, overthinking.TUNING_SEED)]
        assert {row["weight"] for row in tuned} == {*weights}


@pytest.mark.parametrize(
    ("after", "chosen"), [((0.9, 0.89, 0.8), "0.2"), ((0.8, 0.8, 0.7), "0.1"), ((0.8, 0.8, 0.895), "0.5")]
)
def test_weight_is_the_largest_within_the_margin_else_the_smallest(after: tuple[float, ...], chosen: str) -> None:
    seed, recipe = overthinking.TUNING_SEED, "overthinking"
    made = [
        {"recipe": recipe, "weight": weight, "seed": seed, "success": [0.9, each]}
        for weight, each in zip(overthinking.WEIGHTS[recipe], after, strict=True)
    ]
    assert overthinking.chosen(made, recipe) == chosen


@pytest.mark.slow
def test_a_run_is_made_once(tmp_path, monkeypatch) -> None:
    result = tmp_path / "overthinking.jsonl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = model_path(recipes.load("overthinking", ["--warm_up", json.dumps(WARM_UP)]))
    made = read_rows(result)
    assert made == []
    for _ in range(2):
        for recipe, weights in overthinking.WEIGHTS.items():
            overthinking.make(made, result, tmp_path / "runs", start, recipe, weights[0], 7, TINY)
    assert read_rows(result) == made
    assert [(row["recipe"], row["weight"]) for row in made] == [
        ("overthinking", "0.1"),
        ("overthinking-length", "0.01"),
    ]
    assert all(len(row["success"]) == len(row["tokens"]) == 2 for row in made)
    assert made[0]["tokens"][0] == made[1]["tokens"][0] > 0
