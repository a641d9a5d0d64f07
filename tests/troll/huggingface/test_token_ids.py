"""Tokens for which a model's embedding has no row."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig

from tests.troll.trl.tiny import COMMON, adapted, make_model, make_tokenizer
from troll.huggingface.token_ids import check_token_ids, embedding_rows, without_embedding

ROWS = COMMON["vocab_size"]

ADAPTERS = {
    "linear": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
    "embedding": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "embed_tokens"]),
    "saved": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[1]),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_embedding_rows_are_those_of_the_embedding(name):
    """Within adapters, and whatever the configuration says."""
    model = make_model("gpt2") if name is None else make_model("llama")
    model.resize_token_embeddings(64)
    if name != "prompt":  # PEFT itself reads the configuration there
        model.config.vocab_size = ROWS
    assert embedding_rows(model if name is None else adapted(model, ADAPTERS[name])) == 64


def test_without_embedding_names_the_tokens_beyond_the_last_row():
    model, tokenizer = make_model("llama"), make_tokenizer()
    assert without_embedding(model, tokenizer) == {}
    tokenizer.add_tokens(["<new>", "<newer>"])
    assert without_embedding(model, tokenizer) == {ROWS: "<new>", ROWS + 1: "<newer>"}
    model.resize_token_embeddings(64)  # padded
    assert without_embedding(model, tokenizer) == {}


def test_check_token_ids_names_the_largest():
    model = make_model("llama")
    check_token_ids(model, torch.tensor([[0, ROWS - 1]]))
    check_token_ids(model, torch.zeros(0, 3, dtype=torch.long))
    check_token_ids(model, torch.full((1, 1), ROWS, device="meta"))  # as a GPU, which is not waited for
    with pytest.raises(ValueError, match=f"token id {ROWS + 3}, and the embedding of LlamaForCausalLM has {ROWS} rows"):
        check_token_ids(model, torch.tensor([[0, ROWS + 3]]))
