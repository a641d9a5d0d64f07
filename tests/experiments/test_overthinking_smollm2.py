"""SmolLM2 in docs/study/shorter-answers.md: what was measured, of a model that was taught several attempts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments import overthinking, overthinking_smollm2
from experiments.rows import Row, read_rows
from tests.troll_lab.runs.conftest import write_tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
TINY = ["--max_steps", "2", "--updates_per_rollout", "2", "--eval_steps", "2", "--eval_size", "16"]


@pytest.mark.slow
def test_taught_model_is_trained_by_both_methods(tmp_path: Path) -> None:
    model, start = write_tiny_model(tmp_path / "model", CHAT_TEMPLATE), tmp_path / "start"
    overthinking_smollm2.teach(str(model), start, max_steps=2, use_cpu=True)
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, start))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    rows: list[Row] = []
    result = tmp_path / "result.jsonl"
    for recipe, weight in overthinking_smollm2.WEIGHTS.items():
        fields = [*overthinking_smollm2.FIELDS, *TINY]
        overthinking.make(rows, result, tmp_path / "runs", str(start), recipe, weight, 0, fields)
    assert read_rows(result) == rows and [row["recipe"] for row in rows] == list(overthinking_smollm2.WEIGHTS)
    assert rows[0]["tokens"][0] == rows[1]["tokens"][0] > 0


def test_page_has_the_table_and_every_run_counts() -> None:
    page = (overthinking.RESULT.parents[1] / "study" / "shorter-answers.md").read_text()
    rows = read_rows(overthinking_smollm2.RESULT)
    assert overthinking.outcome(rows, overthinking_smollm2.WEIGHTS, overthinking_smollm2.SEEDS) in page
    assert sorted((row["recipe"], row["seed"]) for row in rows) == sorted(
        (recipe, seed) for recipe in overthinking_smollm2.WEIGHTS for seed in overthinking_smollm2.SEEDS
    )
