"""Prompts of different lengths are scored at the positions at which their completions were sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.troll.huggingface.architectures import small_config
from tests.troll.trl import tiny
from tests.troll.trl.tiny import LOG_PROB_ERROR, rolled_out, unpadded
from troll.trl import seam
from troll.trl.trainer import OLD_POLICY
from troll.trust_region.policy.packed import PackedPolicy

TEMPERATURE = 0.7


def saved(kind: str, folder: Path) -> Any:
    """A model from a folder, from which TRL loads the reference."""
    torch.manual_seed(0)
    changes = {"vocab_size": len(tiny.VOCABULARY), "initializer_range": 0.1, "eos_token_id": [2, 3, 4, 5, 6]}
    AutoModelForCausalLM.from_config(small_config(kind, **changes)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def alone(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The log-probabilities of a rollout's completions, (B, T), one row at a time and without padding."""
    result = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
    rows = zip(unpadded(inputs, "prompt"), unpadded(inputs), strict=True)
    for row, (prompt, completion) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0] / TEMPERATURE
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        result[row, : len(completion)] = log_probs.gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
    return result


def adapter(used: bool) -> LoraConfig | None:
    """PEFT calls the forward of a model without its hooks."""
    return LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear") if used else None


@pytest.mark.parametrize(
    ("kind", "surrogate", "lora"), [("gpt2", "troll", False), ("gpt2", "troll", True), ("gpt_neo", "clip", True)]
)
def test_padded_prompts_are_scored_as_they_are_without_padding(make, tmp_path, kind, surrogate, lora):
    """By the old policy, by the reference, and in the update: read from the head, or scored by TRL."""
    settings = {"surrogate": surrogate, "temperature": TEMPERATURE, "beta": 0.1, "peft_config": adapter(lora)}
    trainer = make(model=saved(kind, tmp_path / "model"), **settings)
    inputs = rolled_out(trainer)
    assert not inputs["prompt_mask"].all()
    counts, model = inputs["completion_mask"].bool(), trainer.model.eval()
    at = counts.nonzero(as_tuple=True)
    scores = [inputs["old_per_token_logps"], inputs["ref_per_token_logps"]]
    scores.append(seam.score(trainer, model, inputs).log_probs)
    if surrogate == "troll":
        old = PackedPolicy.stack(inputs[OLD_POLICY]).unpack()[at]
        scores.append(trainer.surrogate_loss.read_new_policy(model, inputs, counts, at, old)[1].log_probs)
    expected = alone(model, inputs)
    for actual in scores:
        torch.testing.assert_close(actual.detach()[counts], expected[counts], rtol=0, atol=LOG_PROB_ERROR)
