"""The table of a conformance test as a Hugging Face model: what any trainer can load."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from troll.testing import VOCAB_SIZE


def table_model(table: Tensor) -> PreTrainedModel:
    """A causal language model that is a bigram table: after token a, its logits are row a of a (V, V) table.

    Embeddings are unit vectors, its one layer (without any, FSDP finds nothing to wrap) adds 0 to them, and the head's
    weight is the table, transposed.
    """
    shape: dict[str, Any] = {"hidden_size": VOCAB_SIZE, "intermediate_size": 8, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    shape |= {"tie_word_embeddings": False, "rms_norm_eps": 1e-12}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=2, pad_token_id=0, **shape)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # What the norm makes of a unit vector is √V times it.
        model.model.norm.weight.fill_(VOCAB_SIZE**-0.5)
    set_table(model, table)
    return model


@torch.no_grad()
def set_table(model: torch.nn.Module, table: Tensor) -> None:
    """Another table for the same model, also where FSDP2 has divided it over a single process."""
    weight: Any = model.get_parameter("lm_head.weight")
    (weight.to_local() if hasattr(weight, "to_local") else weight).copy_(table.T)
