"""Dropout is found in layers, and in the attributes that functions read."""

from typing import Any

import pytest
from torch import nn

from tests.troll.trl import tiny
from troll.huggingface.dropout import disable_dropout


class WithDropout(nn.Module):
    """Rates as modules of transformers keep them, and other numbers whose names have "drop" in them."""

    def __init__(self) -> None:
        super().__init__()
        self.resid_dropout, self.attention_dropout, self.layerdrop = nn.Dropout(0.1), 0.2, 0.3
        self.drop_threshold, self.token_dropout, self.p = 0.4, True, 0.5


def test_disable_dropout_leaves_other_numbers_alone():
    first, last = WithDropout(), nn.AlphaDropout(0.6)
    disable_dropout(nn.Sequential(first, last))
    assert (first.resid_dropout.p, first.attention_dropout, first.layerdrop, last.p) == (0, 0, 0, 0)
    assert (first.drop_threshold, first.token_dropout, first.p) == (0.4, True, 0.5)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "opt", "gpt2"])
def test_disable_dropout_finds_every_rate_of_a_configuration(architecture):
    """Two models, with and without dropout, are the same afterwards in every number."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}
    sizes |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    names = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "layerdrop")
    numbers = []
    for rate in (0.0, 0.3):
        changes: dict[str, Any] = {**sizes, **dict.fromkeys(names, rate)}
        model = tiny.make_model(architecture, **changes)
        disable_dropout(model)
        numbers.append([value for module in model.modules() for value in vars(module).values() if type(value) is float])
    assert numbers[0] == numbers[1]
