"""The comparison on SmolLM2 in docs/estimators.md is what was measured, of a model that was taught several attempts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from experiments import overthinking, overthinking_smollm2
from experiments.rows import Row, read_rows
from troll.runs.toy_model import character_tokenizer, model_config

TINY = ["--max_steps", "2", "--updates_per_rollout", "2", "--eval_steps", "2", "--eval_size", "16"]


def chat_model(folder: Path) -> Path:
    """A random Qwen3 of a few thousand parameters, with a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    config = model_config(tokenizer)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 16, 32, 1, 4
    config.layer_types = ["full_attention"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_taught_model_is_trained_by_both_methods(tmp_path: Path) -> None:
    model, start = chat_model(tmp_path / "model"), tmp_path / "start"
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
    page = (overthinking.RESULT.parents[1] / "estimators.md").read_text()
    rows = read_rows(overthinking_smollm2.RESULT)
    assert overthinking.outcome(rows, overthinking_smollm2.WEIGHTS, overthinking_smollm2.SEEDS) in page
    assert sorted((row["recipe"], row["seed"]) for row in rows) == sorted(
        (recipe, seed) for recipe in overthinking_smollm2.WEIGHTS for seed in overthinking_smollm2.SEEDS
    )
