"""Tiny models with TRL's fused head and ours, and something to put through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from tests.trl import tiny
from troll.trl.fused_head import add_policy_head
from troll.trl.positions import scatter

#: Tokens of a completion.
T = 5


def with_heads(
    model: PreTrainedModel, tail: Any = "bucket", temperature: float = 1.0, cast_lm_head_to_fp32: bool = False
) -> Any:
    add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
    add_policy_head(model, top_k=8, mass_threshold=1e-3, tail=tail)
    return model


def with_biased_head(model: PreTrainedModel) -> PreTrainedModel:
    head = model.get_output_embeddings()
    biased = torch.nn.Linear(head.in_features, head.out_features, bias=True)
    biased.weight.data.copy_(head.weight.data)
    model.set_output_embeddings(biased)
    return model


def batch() -> dict[str, Any]:
    """Two prompts of three tokens, and completions of five of which some are not scored."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(7, 40, (2, 3 + T), generator=generator)
    labels = input_ids.clone()
    labels[:, :-T] = -100
    labels[0, -2:] = -100
    labels[1, -4] = -100
    return {"input_ids": input_ids, "labels": labels, "fused_lm_head": True}


def captured_support(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids, (B, T, K), and slots, (B, T), as the trainer would pass them."""
    with torch.no_grad():
        output = model(**inputs, capture_policy=True)
    scored, policy = output.label_mask[:, -T:], output.captured(1e-3)
    return scatter(policy.token_ids, scored, fill=-1), scatter(policy.slot, scored)


def pull(output: FusedCausalLMOutput) -> Tensor:
    """A loss that takes different amounts of every token's log-probability and entropy."""
    assert output.log_probs is not None
    assert output.entropy is not None
    weights = torch.linspace(-1, 1, output.log_probs.numel()).view(output.log_probs.shape)
    return (weights * output.log_probs + weights.flip(-1) * output.entropy).sum()


MODELS: dict[str, Any] = {
    "plain": lambda: tiny.make_model("llama"),
    "tied": lambda: tiny.make_model("llama", tie_word_embeddings=True),
    "biased": lambda: with_biased_head(tiny.make_model("llama")),
    "softcap": lambda: tiny.make_model("gemma2"),
    "scale": lambda: tiny.make_model("cohere"),
    "inverse scale": lambda: tiny.make_model("granite"),
}
