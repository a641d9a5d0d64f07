"""Tiny models by their heads, and something to put through them."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.troll.trl import tiny
from troll import SparsePolicy, TrustRegionStep, huggingface

#: Tokens of a completion.
T = 5

CAPTURE: dict[str, Any] = {"top_k": 8, "mass_threshold": 1e-3}


def with_biased_head(model: PreTrainedModel) -> PreTrainedModel:
    head = model.get_output_embeddings()
    biased = torch.nn.Linear(head.in_features, head.out_features, bias=True)
    biased.weight.data.copy_(head.weight.data)
    torch.nn.init.normal_(biased.bias)
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
    return {"input_ids": input_ids, "labels": labels}


def scored(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["labels"][:, 1:] != -100
    return mask


def captured(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> SparsePolicy:
    return huggingface.capture(model, **inputs, temperature=temperature, **CAPTURE)


def read(model: Any, inputs: dict[str, Any], old: SparsePolicy, **options: Any) -> TrustRegionStep:
    """A step without a bound: log-probabilities and entropies of the network itself."""
    return huggingface.trust_region_step(model, **inputs, old=old, kl_bound=torch.inf, entropy=True, **options)


def of_logits(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, (B, L − 1), from the model's own logits; 0 where not scored."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].float() / temperature
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    labels, mask = inputs["labels"][:, 1:], scored(inputs)
    own = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return own.masked_fill(~mask, 0), entropy.masked_fill(~mask, 0)


def pull(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss that takes different amounts of every token's log-probability and entropy."""
    assert entropy is not None
    weights = torch.linspace(-1, 1, log_probs.numel()).view(log_probs.shape)
    return (weights * log_probs + weights.flip(-1) * entropy).sum()


MODELS: dict[str, Any] = {
    "plain": lambda: tiny.make_model("llama"),
    "tied": lambda: tiny.make_model("llama", tie_word_embeddings=True),
    "biased": lambda: with_biased_head(tiny.make_model("llama")),
}
