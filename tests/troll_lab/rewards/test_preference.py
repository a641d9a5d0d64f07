from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from troll_lab.rewards.preference import load_reward_model

SIZES: dict[str, Any] = {
    "vocab_size": 3,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "head_dim": 8,
}
SIZES |= {"num_attention_heads": 1, "num_key_value_heads": 1, "pad_token_id": 0}


def save(folder, kind=Qwen3ForSequenceClassification, *, labels=1, template=None, pad="<pad>"):
    """Writes a tiny reward model, or another model, and returns its folder as text."""
    kind(Qwen3Config(**SIZES | {"num_labels": labels})).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, chat_template=template)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_model_scores_texts_and_keeps_no_cache(tmp_path, conversational):
    template = "{{ messages[0].content }}" if conversational else None
    model = load_reward_model(save(tmp_path, template=template), conversational=conversational)
    output = model(input_ids=torch.tensor([[1, 2], [2, 1]]))
    assert output.logits.shape == (2, 1)
    assert output.past_key_values is None  # it reads a whole rollout at once


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": Qwen3ForCausalLM}, "is not a reward model: it has no weights for score.weight"),
        ({"labels": 3}, "cannot load the reward model"),
        ({"pad": None}, "has no token to pad with"),
        ({}, "has no chat template"),
        (None, "cannot load the reward model '.*'"),
    ],
)
def test_load_reward_model_refuses_other_models(tmp_path, arguments, message):
    folder = str(tmp_path) if arguments is None else save(tmp_path, **arguments)
    with pytest.raises(ValueError, match=message) as error:
        load_reward_model(folder, conversational=arguments == {})
    assert "\n" not in str(error.value)
