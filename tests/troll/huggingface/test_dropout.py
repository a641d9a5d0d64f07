"""Dropout is found in layers and in the attributes that functions read, set to 0, and warned about."""

from typing import Any

import pytest
from torch import nn

from tests.troll.huggingface.heads import batch, captured
from tests.troll.trl import tiny
from troll import huggingface
from troll.huggingface.dropout import disable_dropout, dropout_rates

NAMES = [
    "jitter_noise",
    "input_jitter_noise",
    "moe_jitter_eps",
    "dropout_ratio",
    "drop_rate",
    "drop_prob",
    "emb_pdrop",
    "ffn_dropout",
    "attn_dropout_p",
    "layerdrop",
]


@pytest.mark.parametrize("name", NAMES)
def test_dropout_rates_finds_the_rate_of_a_function_by_its_name(name):
    """As modules of transformers keep it, next to other numbers whose names have "drop" in them."""
    module: Any = nn.Identity()
    setattr(module, name, 0.1)
    module.drop_threshold, module.token_dropout, module.p = 0.4, True, 0.5
    assert list(dropout_rates(module)) == [(module, name)]
    disable_dropout(module)
    assert list(dropout_rates(module)) == []
    assert (module.drop_threshold, module.token_dropout, module.p) == (0.4, True, 0.5)


@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout])
def test_disable_dropout_switches_layers_off(layer):
    made = layer(0.6)
    disable_dropout(nn.Sequential(made))
    assert made.p == 0


#: The sizes of models that have other names for them.
SIZES: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64}
SIZES |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_types": [[["global", "local"], 1]]}
RATES = ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "layerdrop")


@pytest.mark.parametrize("architecture", ["llama", "bloom", "opt", "gpt2", "falcon", "persimmon", "gpt_neo"])
def test_disable_dropout_finds_every_rate_of_a_configuration(architecture):
    """Two models, with and without dropout, are the same afterwards in every number."""
    numbers = []
    for rate in (0.0, 0.3):
        changes: dict[str, Any] = {**SIZES, **dict.fromkeys(RATES, rate)}
        model = tiny.make_model(architecture, **changes)
        assert any(dropout_rates(model)) == (rate > 0)
        disable_dropout(model)
        assert not any(dropout_rates(model))
        numbers.append([value for module in model.modules() for value in vars(module).values() if type(value) is float])
    assert numbers[0] == numbers[1]


def test_active_dropout_is_named():
    """In the capture and in the step; without it nothing is said, nor in evaluation mode."""
    model, inputs = tiny.make_model("llama", attention_dropout=0.1), batch()
    with tiny.no_warnings_about("dropout"):
        old = captured(model.eval(), inputs)
        huggingface.trust_region_step(model, **inputs, old=old)
        captured(tiny.make_model("llama").train(), inputs)
    named = r"training mode and has dropout \(.*=0\.1 of .*model\.eval\(\)"
    with pytest.warns(UserWarning, match=named):
        captured(model.train(), inputs)
    with pytest.warns(UserWarning, match=named):
        huggingface.trust_region_step(model, **inputs, old=old)
