"""The scripts of the study that make runs of their own, each once and small."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments import memory_agent as controls
from experiments import movements, overthinking, overthinking_smollm2, signal
from experiments.rows import Row, read_rows
from tests.troll.trl.surrogates.scored import pair, scored_tokens, settings
from tests.troll_lab.runs.conftest import write_tiny_model
from troll.trl.surrogates import NoSettings, formulas
from troll_lab import recipes
from troll_lab.runs import memory_agent
from troll_lab.runs.build import model_path
from troll_lab.runs.toy_model import character_tokenizer

TINY = ["--max_steps", "2", "--updates_per_rollout", "2", "--eval_steps", "2", "--eval_size", "16"]


@pytest.mark.parametrize(("place", "without_signal"), [("without signal", True), ("with signal", False)])
def test_pull_acts_on_tokens_of_its_place_only(place: str, without_signal: bool) -> None:
    advantages = torch.tensor([1.5, 0.0, -0.5, 0.0, 2.0, 0.0], dtype=torch.float64)
    new, old, sampled = pair()
    tokens = scored_tokens(new, old, sampled, advantages=advantages)
    args = settings(pull="proximal")
    whole, part = (terms(tokens, args, NoSettings()) for terms in (formulas.troll, signal.PLACES[place]))
    assert part.log_ratio is not None and whole.log_ratio is not None
    assert part.penalty is not None and whole.penalty is not None
    assert torch.equal(part.log_ratio, whole.log_ratio)
    there = (advantages == 0) == without_signal
    assert torch.equal(part.penalty[there], whole.penalty[there]) and (part.penalty[there] > 0).all()
    assert not part.penalty[~there].any()


def test_movements_makes_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ["--iterations", "1", "--episodes", "2", "--eval_episodes", "2", "--num_envs", "2", "--updates", "1"]
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(movements, "DOCS", tmp_path)
    rows = read_rows(movements.result("tce-reach"))
    for _ in range(2):
        assert movements.make(rows, "tce-reach", tmp_path / "runs", "clip", "1e-3", 7, fields)
    assert read_rows(movements.result("tce-reach")) == rows and len(rows) == 1
    assert rows[0]["environment_steps"] == [0, 200] and len(rows[0]["success"]) == 2


@pytest.mark.slow
def test_overthinking_makes_a_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "overthinking.jsonl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm_up = {"max_steps": 2, "batch_size": 8, "num_questions": 64, "test_size": 8, "target_success": None}
    start = model_path(recipes.load("overthinking", ["--warm_up", json.dumps(warm_up)]))
    fields = [*TINY, "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "16"]
    made: list[Row] = []
    for _ in range(2):
        for recipe, weights in overthinking.WEIGHTS.items():
            overthinking.make(made, result, tmp_path / "runs", start, recipe, weights[0], 7, fields)
    assert read_rows(result) == made
    assert [(row["recipe"], row["weight"]) for row in made] == [
        ("overthinking", "0.1"),
        ("overthinking-length", "0.01"),
    ]
    assert all(len(row["success"]) == len(row["tokens"]) == 2 for row in made)
    assert made[0]["tokens"][0] == made[1]["tokens"][0] > 0


@pytest.mark.slow
def test_overthinking_smollm2_teaches_and_trains(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}={% endif %}"
    model, start = write_tiny_model(tmp_path / "model", template), tmp_path / "start"
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


def test_memory_agent_has_controls_that_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = character_tokenizer()
    trainer, asked = SimpleNamespace(processing_class=tokenizer), list[list[str]]()

    def complete(trainer, prompts):  # all prompts of a round are answered "7"
        asked.append(tokenizer.batch_decode(prompts))
        return tokenizer(["7"] * len(prompts))["input_ids"], None

    monkeypatch.setattr(memory_agent, "complete", complete)
    whole, last = memory_agent.rollout(["9 + 4 ="], trainer), controls.last_only(["9 + 4 ="], trainer)
    assert asked == [["9 ="], ["7 + 4 ="], ["7 ="]] * 2
    assert "earlier" not in last and last == {name: value for name, value in whole.items() if name != "earlier"}
    found = controls.forgetful(["9 + 4 ="], trainer)
    assert asked[6:] == [["9 ="], ["+ 4 ="], [" ="]]
    assert len(found["earlier"][0]) == 2
