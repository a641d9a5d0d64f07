"""The load-balancing loss that is read with a mixture of experts is the model's own."""

from typing import Any

import pytest
import torch

from tests.troll.huggingface.architectures import small_model
from tests.troll.huggingface.heads import batch, captured, scored
from tests.troll.trl.tiny import assert_same_gradients, gradients
from troll.huggingface.policies import read_tokens
from troll.huggingface.routers import load_balancing_loss

#: All kinds whose own forward computes the loss, except for Doge, which computes another one.
MIXTURES = ["dbrx", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa"]
MIXTURES += ["granitemoehybrid", "granitemoeshared", "jamba", "jetmoe", "laguna", "lara_mini", "mellum", "minimax"]
MIXTURES += ["minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text"]
MIXTURES += ["qwen3_moe", "qwen3_next", "qwen4_exp_text"]

QUICK = ("granitemoe", "granitemoeshared", "gpt_oss", "mixtral", "phimoe", "qwen3_moe")


def aux_loss(model: Any, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """What the reading gives next to the policy."""
    old, at = captured(model, inputs), scored(inputs).nonzero(as_tuple=True)
    _, output = read_tokens(
        model,
        inputs["labels"][:, 1:][at],
        at,
        old.shape[1],
        old[at],
        temperature=1.0,
        entropy=False,
        input_ids=inputs["input_ids"],
        attention_mask=mask,
        output_router_logits=True,
    )
    assert output.aux_loss is not None
    return output.aux_loss


def rows() -> tuple[dict[str, Any], torch.Tensor]:
    inputs = batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :2] = 0
    return inputs, mask


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in MIXTURES]
)
def test_the_loss_of_routers_is_the_models_own(kind):
    model: Any = small_model(kind)
    inputs, mask = rows()
    actual = aux_loss(model, inputs, mask)
    actual.backward()
    read = gradients(model)
    model.zero_grad()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    own = {"attention_mask": mask, "position_ids": positions, "output_router_logits": True, "use_cache": False}
    expected = model(inputs["input_ids"], **own).aux_loss
    torch.testing.assert_close(actual, expected)
    expected.backward()
    assert_same_gradients(read, gradients(model))


def test_a_mixture_without_experts_has_no_loss_of_routers():
    """As Granite's dense models are."""
    model = small_model("granitemoehybrid", num_local_experts=0, num_experts_per_tok=0)
    assert aux_loss(model, *rows()) == 0


def test_routers_without_scores_of_experts_are_refused():
    model = small_model("doge", is_moe=True)
    with pytest.raises(ValueError, match=r"routers of DogeForCausalLM .* set router_aux_loss_coef to 0"):
        aux_loss(model, *rows())


def test_a_mask_may_also_cover_a_prefix():
    model = small_model("mixtral")
    logits = (torch.randn(2 * 5, 4, generator=torch.Generator().manual_seed(0)),)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    longer = torch.nn.functional.pad(mask, (3, 0), value=1)
    assert torch.equal(load_balancing_loss(model, logits, longer), load_balancing_loss(model, logits, mask))
