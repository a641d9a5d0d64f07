"""The policy loss among the terms of verl's: with a bound that nothing reaches it is verl's own, unclipped."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import within
from tests.troll.verl.actor import Step, as_batch, model_folder, rollout, single, trolled
from tests.troll.verl.reference import Settings, check, compared, mini_batches
from troll.trust_region.step import Pull
from troll.verl.loss import ProjectedTokens, projected, trust_region_policy_loss

#: A clip that nothing reaches.
UNCLIPPED = {"clip_ratio": 1e9, "clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}

#: A trust region that nothing reaches.
UNBOUND = {"kl_bound": 1e6, "top_k": 64}


def per_token(low: float, high: float, seed: int) -> list[Tensor]:
    """Numbers for the response tokens of the rollout."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(len(s.response), generator=generator) * (high - low) + low for s in rollout()]


#: verl's reference policy and its correction weights.
FIELDS: dict[str, Any] = {"ref_log_prob": per_token(-6, -1, seed=3), "rollout_is_weights": per_token(0.2, 2, seed=4)}

#: verl's other terms of the loss.
TERMS = {"entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "low_var_kl"}

#: What TROLL is set to, what verl besides its unclipped loss, and the fields of the batch.
UNREACHABLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "token-mean": ({}, {}, {}),
    "gspo": ({"ratio_level": "sequence"}, {"loss_agg_mode": "seq-mean-token-mean", "loss_mode": "gspo"}, {}),
    "other terms": ({}, TERMS, FIELDS),
}


@pytest.mark.parametrize(("settings", "stock", "fields"), UNREACHABLE.values(), ids=UNREACHABLE)
def test_unreachable_bound_is_verls_unclipped_loss(
    settings: dict[str, Any], stock: dict[str, Any], fields: dict[str, Any]
) -> None:
    shared = {name: value for name, value in stock.items() if name != "loss_mode"}
    steps, metrics, parameters = trained(trolled().reset(**UNBOUND, **settings, **shared), fields)
    # verl's loss of its own engine, with verl's old log-probabilities.
    wanted_steps, wanted, wanted_parameters = trained(single(plug_in=()).reset(**UNCLIPPED, **stock), fields)
    assert metrics["trust_region/projected_fraction"] == [0.0] * 3
    for name in {"loss", "grad_norm", "actor/ppo_kl", "actor/entropy_loss", "kl_loss"} & wanted.keys():
        assert metrics[name] == pytest.approx(wanted[name], rel=3e-5, abs=3e-6), name
    for step, other in zip(steps[:2], wanted_steps[:2], strict=True):
        assert compared(step.gradients, other.gradients) < within(1e-4)
    assert compared(parameters, wanted_parameters) < within(1e-4)


def trained(actor: Any, fields: Mapping[str, Any]) -> tuple[list[Step], dict[str, Any], dict[str, Tensor]]:
    batch = as_batch(rollout(), **fields)
    metrics = actor.update(actor.score(batch))
    return list(actor.steps), dict(metrics), actor.parameters()


@pytest.mark.parametrize("pull", ["projection", "proximal"])
def test_projected_tokens_are_aggregated_as_verl_does(pull: Pull) -> None:
    """With verl's other terms, an advantage of each token, and a mean that needs the sizes of the whole batch."""
    advantages = per_token(-2, 2, seed=5)
    samples = [dataclasses.replace(sample, advantages=own) for sample, own in zip(rollout(), advantages, strict=True)]
    settings: dict[str, Any] = {"regression_weight": 0.5, "loss_agg_mode": "seq-mean-token-sum-norm", "pull": pull}
    actor = trolled().reset(loss_scale_factor=6, **TERMS, **settings)
    metrics = actor.update(actor.score(as_batch(samples, **FIELDS)))
    references, weights = (
        {id(sample): value for sample, value in zip(samples, values, strict=True)} for values in FIELDS.values()
    )
    wanted = Settings(entropy_coeff=0.3, kl_loss_coef=0.5, **settings)
    terms = {"weights": weights, "reference_log_probs": references}
    check(model_folder(), actor.steps, metrics, mini_batches(samples), wanted, **terms)


def test_rollout_correction_does_not_weight_the_pull() -> None:
    """By hand, of three tokens of which the last does not count."""
    config = trolled().reset(regression_weight=2.0).actor
    object.__setattr__(config, "global_batch_info", {})
    log_q, log_p, regression = torch.tensor([[[-1.0, -2.0, -9.0]], [[-1.5, -1.0, -1.0]], [[0.1, 0.2, 7.0]]])
    advantages, weights, mask = torch.tensor([[[1.0, -1.0, 5.0]], [[0.5, 3.0, 7.0]], [[1.0, 1.0, 0.0]]])
    kept_log_mass = torch.tensor([[-0.1, -0.2, 9.0]])  # log p̃ is of the whole policy, log p of the kept tokens
    with projected(ProjectedTokens(log_q - log_p, regression, kept_log_mass)):
        loss, metrics = trust_region_policy_loss(
            log_p, log_q, advantages, mask.bool(), config=config, rollout_is_weights=weights
        )
    terms = [-(math.e**0.5) * 0.5 + 0.2, math.e**-1.0 * 3.0 + 0.4]
    assert loss.item() == pytest.approx(sum(terms) / 2)
    assert metrics["actor/ppo_kl"] == pytest.approx((-0.5 - 0.1 + 1.0 - 0.2) / 2)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 120.0])
def test_masked_tokens_never_matter(value: float) -> None:
    config = trolled().reset().actor
    object.__setattr__(config, "global_batch_info", {})
    log_p, mask = torch.full((1, 3), -1.0), torch.tensor([[True, True, False]])
    log_q = torch.tensor([[-1.0, -2.0, value]], requires_grad=True)
    regression = torch.tensor([[0.1, 0.2, value]], requires_grad=True)
    with projected(ProjectedTokens(log_q - log_p, regression)):
        loss, _ = trust_region_policy_loss(log_p, log_p, torch.ones(1, 3), mask, config=config)
    loss.backward()
    assert loss.isfinite()
    for tensor in (log_q, regression):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad[0, 2] == 0


def test_projections_do_not_outlive_their_micro_batch() -> None:
    tokens = ProjectedTokens(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(KeyError), projected(tokens):
        raise KeyError
    with pytest.raises(RuntimeError, match="without an engine that projects"):
        trust_region_policy_loss(*torch.zeros(4, 1, 2), config=None)
