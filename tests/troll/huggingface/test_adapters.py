"""Adapters of weights that several modules share: an engine gets the trained model, or merging is refused."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftConfig, VeraConfig, get_peft_model
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration

from tests.troll.trl.tiny import adapted, make_model
from troll.huggingface.adapters import adapted_and_shared, refuse_merging

IDS = torch.arange(3, 40).unsqueeze(0)

Q: dict[str, Any] = {"target_modules": ["q_proj"]}
EVERYWHERE: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "embed_tokens", "lm_head"]}

#: Settings of a LoRA adapter of Llama, by what is special about them.
LORA: dict[str, dict[str, Any]] = {
    **{name: {"target_modules": [name]} for name in ("q_proj", "down_proj", "lm_head", "embed_tokens")},
    "all-linear": {"target_modules": "all-linear"},
    "everywhere": EVERYWHERE,
    "tied adapters": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "tied adapter": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "dora": {**EVERYWHERE, "use_dora": True},
    "rslora": {**EVERYWHERE, "use_rslora": True},
    "bias": {**EVERYWHERE, "bias": "all"},
    "saved lm_head": {"modules_to_save": ["lm_head"], **Q},
    "saved embed_tokens": {"modules_to_save": ["embed_tokens"], **Q},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"], **Q},
    "both saved and tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, **Q},
    "saved and adapted": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"trainable_token_indices": [5, 7], **Q},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [5, 7]}, **Q},
    "other tokens of the head": {"trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [5, 8]}, **Q},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight", "embed_tokens.weight"]},
    "replicated layers": {"target_modules": ["q_proj", "up_proj"], "layer_replication": [(0, 2), (0, 2)]},
}

ADAPTERS: dict[str, PeftConfig] = {
    **{name: LoraConfig(task_type="CAUSAL_LM", r=4, **settings) for name, settings in LORA.items()},
    "adalora": AdaLoraConfig(task_type="CAUSAL_LM", total_step=10, target_modules=["q_proj", "lm_head"]),
    "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "lm_head"], feedforward_modules=[]),
    "loha": LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"]),
    "oft": OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=["q_proj", "lm_head"]),
    "vera": VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"]),
}


def test_weights_without_an_adapter_stay_shared():
    assert adapted_and_shared(adapted(make_model("llama", tie_word_embeddings=True), ADAPTERS["all-linear"])) == []


SHARED = "embed_tokens and lm_head share"

#: What is said of an adapter whose embedding and head share their weight, unless it can be merged.
REFUSED = {
    **dict.fromkeys(("lm_head", "embed_tokens", "everywhere", "tied adapters", "tied adapter"), SHARED),
    **dict.fromkeys(("dora", "rslora", "bias", "saved lm_head", "saved embed_tokens", "both saved"), SHARED),
    **dict.fromkeys(("saved and adapted", "parameters", "loha", "oft", "vera", "adalora", "ia3"), SHARED),
    **dict.fromkeys(("tokens", "tokens of the head", "other tokens of the head"), "trainable_token_indices"),
    "replicated layers": "layers.0.self_attn.q_proj and model.layers.2.self_attn.q_proj share",
}

REFUSED_UNTIED = {name: words for name, words in REFUSED.items() if words != SHARED}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_engine_gets_the_trained_model_or_merging_is_refused(name, tied):
    """vLLM takes the weights that TRL sends by name; the head of a tied model is none of them."""
    model = make_model("llama", tie_word_embeddings=tied).double()
    engine = copy.deepcopy(model)
    made = adapted(model, ADAPTERS[name])
    refused = REFUSED if tied else REFUSED_UNTIED
    if name in refused:
        with pytest.raises(ValueError, match=rf"^use_vllm .*{refused[name]}"):
            refuse_merging(made, "use_vllm")
        return
    refuse_merging(made, "use_vllm")
    generation = VLLMGeneration.__new__(VLLMGeneration)
    no_shards = SimpleNamespace(gather_params=lambda _: nullcontext(), is_fsdp=False)
    vars(generation).update(model=made, accelerator=None, _dist=no_shards)
    weights = dict(engine.named_parameters())
    with torch.no_grad():
        expected = made(IDS).logits
        for sent, weight in generation._iter_named_params():
            if sent in weights:  # AdaLoRA's buffers are not
                weights[sent].copy_(weight)
        logits = engine(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_an_untied_model_whose_weights_peft_ties_is_refused():
    """PEFT keeps in a configuration what it has tied, and ties it in the next model as well."""
    config = copy.deepcopy(ADAPTERS["both saved and tied"])
    for tied in (True, False):
        made = get_peft_model(make_model("llama", tie_word_embeddings=tied), config)
    with pytest.raises(ValueError, match=r"^use_vllm .* ensure_weight_tying .*embed_tokens and lm_head are"):
        refuse_merging(made, "use_vllm")


def test_a_model_without_adapters_is_not_refused():
    refuse_merging(make_model("llama", tie_word_embeddings=True), "use_vllm")
    refuse_merging(nn.Linear(1, 1), "use_vllm")
