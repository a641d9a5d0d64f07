"""Rows padded on the left are read like rows without padding, by every architecture of text."""

import inspect
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor

from tests.tolerance import rounding, within
from tests.troll.huggingface.architectures import KINDS, VOCABULARY, small_model
from tests.troll.trl import vision
from troll import huggingface
from troll.huggingface.positions import from_zero, positions_of, with_positions, without_gaps

PADDING, LENGTH = 5, 9

#: Models with learned, sinusoidal, rotary and relative positions, without positions, and recurrent ones.
QUICK = ("biogpt", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "llama", "mamba", "ministral3", "opt", "xglm")

#: Models that count from the first column and take no position ids, and recurrent ones that read padding as tokens.
SHIFTED = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"}
SHIFTED |= {"recurrent_gemma", "rwkv", "trocr", "whisper", "xlstm"}

#: Models whose logits are more than the product of the last hidden states with a matrix.
UNREADABLE = {"bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_text", "llama4_text"}
UNREADABLE |= {"megatron-bert", "modernbert-decoder", "prophetnet", "rembert", "roberta", "roberta-prelayernorm"}
UNREADABLE |= {"roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
#: Models whose tokens see those after them.
NOT_CAUSAL = {"cpmant", "xlm", "xlnet"}

#: What the longest sums of a network may be off by, of logits of 10.
ERROR = rounding(48, 10)


def rows() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {name: torch.nn.functional.pad(x, (PADDING, 0), value=fill[name]) for name, x in inputs.items()}


def read(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the capture and the step give of the last L − 1 positions."""
    old = huggingface.capture(model, **inputs, top_k=8)
    step = huggingface.trust_region_step(model, **inputs, old=old)
    return old.log_prob[:, 1 - LENGTH :], step.log_prob.detach()[:, 1 - LENGTH :]


def difference(model: Any) -> float:
    pairs = zip(read(model, padded(rows())), read(model, rows()), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_padded_row_is_read_like_the_row_itself(kind):
    model = small_model(kind)
    if kind in NOT_CAUSAL:
        with pytest.raises(ValueError, match="must be causal"):
            read(model, rows())
    elif kind in UNREADABLE:
        with pytest.raises((ValueError, RuntimeError), match=r"are not those of its head|must have a|must be"):
            read(model, rows())
    elif kind in SHIFTED:
        assert difference(model) > 0.01
    else:
        assert difference(model) <= within(ERROR)


def test_position_ids_that_are_given_are_kept():
    model, inputs = small_model("gpt2"), padded(rows())
    columns = torch.arange(PADDING + LENGTH).unsqueeze(0)
    own = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=columns).logits
    expected = own[:, :-1].log_softmax(-1).gather(-1, inputs["labels"][:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    given, _ = read(model, inputs | {"position_ids": columns})
    scored = rows()["labels"][:, 1:] != -100
    torch.testing.assert_close(given[scored], expected[:, 1 - LENGTH :][scored], rtol=0, atol=ERROR)
    assert (given - read(model, inputs)[0]).abs().max() > 0.01


def test_positions_from_zero_are_those_of_generate():
    model: Any = small_model("gpt2")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    expected = model._prepare_position_ids_for_generation(mask, inputs)
    assert torch.equal(with_positions(inputs, from_zero)["position_ids"], expected)
    whole = {"input_ids": torch.ones_like(mask)}
    assert with_positions(whole, from_zero) is whole


def test_positions_without_gaps_are_columns_where_there_is_none():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]])
    expected = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3]])
    tokens = mask.bool()
    assert torch.equal(without_gaps(mask)[tokens], expected[tokens])
    assert torch.equal(without_gaps(mask)[0], expected[0])


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_vision_language_model_makes_its_own_positions(family):
    assert positions_of(vision.make_model(family)) is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padding_between_prompt_and_completion_is_no_gap(kind):
    model, inputs = small_model(kind), rows()
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    parted = {
        name: torch.cat([x[:, :4], torch.full((1, PADDING), fill[name]), x[:, 4:]], -1) for name, x in inputs.items()
    }
    for one, other in zip(read(model, parted), read(model, inputs), strict=True):
        # The first label after the padding is predicted by padding.
        torch.testing.assert_close(one[:, 4:], other[:, 4:], rtol=0, atol=ERROR)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_adapters_prefix_comes_before_the_first_position(kind):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: Any = get_peft_model(small_model(kind), config).eval()
    assert difference(model) <= within(ERROR)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_mask_of_ones_changes_no_bit(kind):
    model, inputs = small_model(kind), rows()
    masked = read(model, inputs)
    plain = read(model, {name: x for name, x in inputs.items() if name != "attention_mask"})
    assert all(torch.equal(one, other) for one, other in zip(masked, plain, strict=True))


def test_rotary_models_read_padded_rows_bit_by_bit():
    model, inputs = small_model("qwen3"), padded(rows())
    columns = torch.arange(PADDING + LENGTH).expand(1, -1)
    given = read(model, inputs | {"position_ids": columns})
    assert all(torch.equal(one, other) for one, other in zip(read(model, inputs), given, strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_models_count_from_zero_if_a_shift_changes_their_logits(kind):
    model: Any = small_model(kind)
    rule = positions_of(model)
    assert rule is positions_of(model.base_model)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        assert rule is None
        return
    columns = torch.arange(LENGTH).unsqueeze(0)
    inputs = {"input_ids": rows()["input_ids"], "use_cache": False}
    with torch.no_grad():
        first, second = (model(**inputs, position_ids=x).logits.log_softmax(-1) for x in (columns, columns + 7))
    if float((first - second).abs().max()) > within(ERROR):
        assert rule is from_zero


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "longrope"])
def test_rotary_positions_scaled_by_length_count_from_zero(rope_type):
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {name: [1.0] * 8 for name in ("short_factor", "long_factor")}
    model = small_model("llama", rope_parameters=rope)
    assert positions_of(model) is (without_gaps if rope_type == "default" else from_zero)
