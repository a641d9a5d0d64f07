"""The comparison of rewards of tokens with a penalty on the length, in docs/estimators.md, is what was measured."""

from __future__ import annotations

import json

import pytest

from experiments import overthinking
from troll import recipes
from troll.runs.build import model_path

WARM_UP = {"max_steps": 2, "batch_size": 8, "num_questions": 64, "test_size": 8, "target_success": None}
TINY = ["--max_steps", "2", "--updates_per_rollout", "2", "--eval_steps", "2"]
TINY += ["--eval_size", "16", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "16"]


def rows(success: dict[str, float]) -> list[overthinking.Row]:
    return [
        {"weight": weight, "seed": overthinking.TUNING_SEED, "success": [0.5, each]} for weight, each in success.items()
    ]


def test_page_has_the_table() -> None:
    page = (overthinking.RESULT.parents[1] / "estimators.md").read_text()
    assert overthinking.outcome(overthinking.read_rows()) in page


def test_table_has_every_seed_of_both_and_every_weight_was_tried() -> None:
    made = overthinking.read_rows()
    for weight in ("", overthinking.chosen(made)):
        assert list(overthinking.counted(made, weight, "tokens")) == list(overthinking.SEEDS)
    tried = {row["weight"] for row in made if row["seed"] == overthinking.TUNING_SEED}
    assert tried == {"", *overthinking.WEIGHTS}


@pytest.mark.parametrize(
    ("success", "weight"),
    [((0.9, 0.95, 0.895, 0.7), 1), ((0.9, 0.8, 0.8, 0.7), 0), ((0.9, 0.8, 0.8, 0.895), 2)],
)
def test_weight_is_the_largest_within_the_margin_else_the_smallest(success: tuple[float, ...], weight: int) -> None:
    made = rows(dict(zip(("", *overthinking.WEIGHTS), success, strict=True)))
    assert overthinking.chosen(made) == overthinking.WEIGHTS[weight]


def test_a_run_is_made_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(overthinking, "RESULT", tmp_path / "overthinking.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = model_path(recipes.load("overthinking", ["--warm_up", json.dumps(WARM_UP)]))
    made = overthinking.read_rows()
    assert made == []
    for _ in range(2):
        for weight in ("", "0.01"):
            overthinking.make(made, tmp_path / "runs", start, weight, 7, TINY)
    assert overthinking.read_rows() == made
    assert [(row["recipe"], row["weight"]) for row in made] == [("overthinking", ""), ("overthinking-length", "0.01")]
    assert all(len(row["success"]) == len(row["tokens"]) == 2 for row in made)
    assert made[0]["tokens"][0] == made[1]["tokens"][0] > 0
