"""TROLL's policy loss for verl's registry: the projected ratio instead of the raw one, the pull, and no clip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from troll.verl.seam.training import agg_loss, masked_mean, register_policy_loss


@dataclass(frozen=True)
class ProjectedTokens:
    """The projection of a micro-batch's response tokens, each (B, T).

    Attributes:
        log_ratio: log q(o)/p(o) of the sampled tokens, differentiable.
        regression: The pull, KL(p̃ ‖ ⌊q⌋) or KL(p ‖ p̃), in nats, differentiable.
        kept_log_mass: log p̃(S) of the tokens that a truncated rollout kept; 0 where it kept all.
    """

    log_ratio: Tensor
    regression: Tensor
    kept_log_mass: Tensor | float = 0.0


# Of the engine's outputs, verl passes only log-probabilities to a policy loss.
_projected: ContextVar[ProjectedTokens | None] = ContextVar("projected", default=None)


@contextmanager
def projected(tokens: ProjectedTokens) -> Iterator[None]:
    """A context in which the policy loss uses these tokens."""
    token = _projected.set(tokens)
    try:
        yield
    finally:
        _projected.reset(token)


@register_policy_loss("troll")
def trust_region_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """`−q(o)/p(o) · A · w + α · pull`, aggregated by verl over the tokens; all tensors (B, T).

    verl adds its entropy bonus and its KL to the reference outside, and they act on the network p̃ as usual.

    Args:
        old_log_prob: log p of the sampled tokens, for the metrics; on the kept tokens, where the rollout is truncated.
        log_prob: log p̃ of the sampled tokens, for the metrics.
        advantages: A of each token.
        response_mask: True where a token counts.
        loss_agg_mode: verl's name of the aggregation over tokens.
        config: The actor's configuration.
        rollout_is_weights: w, the weights of verl's rollout correction, for the policy term and not the pull.

    Returns:
        The loss, a scalar, and verl's metrics of the ratio.

    Raises:
        RuntimeError: If the engine is not one of troll.verl, so that nothing was projected.
    """
    tokens = _projected.get()
    if tokens is None:
        raise RuntimeError(
            "loss_mode=troll without an engine that projects: select both with +troll=fsdp or +troll=megatron"
        )
    # Values at masked tokens do not matter, infinities included.
    mask = response_mask.bool()
    log_ratio = torch.where(mask, tokens.log_ratio, 0.0)
    if config.policy_loss.ratio_level == "sequence":
        # verl's own gradient for sequence ratios: the sequence's value, each token's derivative.
        lengths = response_mask.sum(-1, keepdim=True).clamp(min=1)
        mean = (log_ratio.detach() * response_mask).sum(-1, keepdim=True) / lengths
        log_ratio = log_ratio - log_ratio.detach() + mean
    policy_term = -advantages * torch.exp(log_ratio)
    if rollout_is_weights is not None:
        policy_term = policy_term * rollout_is_weights
    loss = agg_loss(
        loss_mat=torch.where(mask, policy_term + config.policy_loss.regression_weight * tokens.regression, 0.0),
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    kl = masked_mean(old_log_prob - log_prob + tokens.kept_log_mass, response_mask)
    return loss, {"actor/ppo_kl": kl.detach().item()}
