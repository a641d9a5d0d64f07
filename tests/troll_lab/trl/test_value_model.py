"""What the critic is made of: which weights it has, which it trains, and for which policies there is none."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForTokenClassification

from tests.tolerance import within
from tests.troll.huggingface.architectures import small_model
from tests.troll.trl import tiny
from tests.troll.trl.test_padding import adapter
from troll_lab.trl.value_model import ValueHead, value_model


def test_the_head_computes_in_float32_under_autocast():
    head = ValueHead(16)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    torch.testing.assert_close(values, hidden.float() @ head.weight.T + head.bias)


@pytest.mark.parametrize("used_by_a_policy", [False, True])
def test_lora_on_all_linear_layers_leaves_the_head_whole(model_path, make, used_by_a_policy):
    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    if used_by_a_policy:  # PEFT then writes the names of the layers into it
        get_peft_model(make.model("llama"), config)
    before = config.to_dict()
    model: Any = value_model(model_path("llama"), config)
    assert config.to_dict() == before
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name in trained if "score" in name] == [
        "base_model.model.score.modules_to_save.default.weight",
        "base_model.model.score.modules_to_save.default.bias",
    ]
    assert sum("lora_A" in name for name in trained) == 2 * 7


def test_what_has_no_critic_is_refused(model_path, make):
    for policy in (model_path("granite"), make.model("granite")):
        with pytest.raises(ValueError, match=r"has a token classifier, got 'granite'"):
            value_model(policy)
    other_head = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="has a linear layer `score`, which GPT2ForTokenClassification lacks"):
        value_model(other_head)
    prompts = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="peft_config must be a LoraConfig for a critic, got PromptTuningConfig"):
        value_model(model_path("llama"), prompts)


@pytest.mark.parametrize(
    ("architecture", "given"), [("qwen3", "folder"), ("gemma2", "model"), ("llama", "with an adapter")]
)
def test_the_backbone_is_the_policys_and_the_head_zero(model_path, make, architecture, given):
    policy = model_path(architecture) if given == "folder" else make.model(architecture)
    if given == "with an adapter":  # which is not copied
        policy = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model: Any = value_model(policy)
    expected, ids = make.model(architecture).base_model, torch.arange(3, 12).unsqueeze(0)
    torch.testing.assert_close(model.base_model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    hidden, expected_hidden = (each(ids).last_hidden_state for each in (model.base_model, expected))
    torch.testing.assert_close(hidden, expected_hidden, rtol=0, atol=0)
    assert not model.score.weight.any() and not model.score.bias.any()


@pytest.mark.parametrize("indices", [[5, 7], {"lm_head": [5, 7]}, {"embed_tokens": [5, 7], "lm_head": [5, 8]}], ids=str)
def test_trained_tokens_of_the_policy_are_those_of_the_critic(make, indices):
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=indices, task_type="CAUSAL_LM")
    policy = tiny.adapted(make.model("llama"), config)  # what it has learned is not copied
    model: Any = value_model(policy, config)
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "token" in name]
    of_embedding = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"
    assert trained == ([] if indices == {"lm_head": [5, 7]} else [of_embedding])
    with model.disable_adapter():
        ids = torch.arange(3, 12).unsqueeze(0)
        expected = make.model("llama").base_model(ids).last_hidden_state
        torch.testing.assert_close(model.get_base_model().base_model(ids).last_hidden_state, expected, rtol=0, atol=0)


def test_value_model_is_in_float32_unless_asked_otherwise(model_path, make):
    for policy in (model_path("llama"), make.model("llama").to(torch.bfloat16)):
        assert {p.dtype for p in value_model(policy).parameters()} == {torch.float32}
    model: Any = value_model(model_path("llama"), model_init_kwargs={"dtype": "bfloat16"})
    assert model.base_model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.score.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_checkpointing_is_switched_on_by_transformers_name(model_path, monkeypatch, name):
    calls = []
    for known in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        monkeypatch.setattr(LlamaForTokenClassification, known, None, raising=False)
    monkeypatch.setattr(LlamaForTokenClassification, name, lambda self, kwargs: calls.append(kwargs))
    value_model(model_path("llama"))
    assert calls == []
    value_model(model_path("llama"), gradient_checkpointing=True)
    assert calls == [{"use_reentrant": False}]


@pytest.mark.parametrize("architecture", ["llama", "persimmon"])
def test_dropout_is_off_in_training_too(architecture):
    """The adapter's, and that which the attention of Persimmon reads from the configuration."""
    policy = tiny.make_model(architecture, attention_dropout=0.5, classifier_dropout=0.5)
    lora = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model: Any = value_model(policy, lora).train()
    torch.nn.init.normal_(model.score.weight)
    ids = torch.arange(3, 12).unsqueeze(0)
    torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert policy.config.attention_dropout == 0.5  # its own


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_the_critic_values_a_padded_row_as_the_row_itself(lora):
    critic: Any = value_model(small_model("ministral3"), adapter(lora)).eval()
    for module in critic.modules():
        if isinstance(module, nn.Linear) and module.out_features == 1:
            nn.init.normal_(module.weight)
    ids = torch.randint(7, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padded, padded_mask = (nn.functional.pad(x, (5, 0)) for x in (ids, mask))
    with torch.no_grad():
        expected = critic(input_ids=ids, attention_mask=mask).logits
        actual = critic(input_ids=padded, attention_mask=padded_mask).logits[:, 5:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=within(1e-5))
