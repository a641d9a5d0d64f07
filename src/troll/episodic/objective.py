"""The policy's loss on a batch of episodes: which events the ratio is of, and what holds the policy back.

Events are the segments of a movement, each with an advantage of its own, or whole episodes as black boxes. A trust
region projects the policy before the ratio is taken and pulls the network to the projection; the clip is its rival.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from troll.gaussian import Gaussian, GaussianProjection, project_kl, trust_region_loss

#: From a policy to the log-density of each event of the batch, (...), in nats.
LogProb = Callable[[Gaussian], Tensor]


def ratio_loss(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`−E[ratio · A]`, without a clip, over all events, (...)."""
    return -(log_ratio.exp() * advantages).mean()


def clip_loss(log_ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """PPO's `−E[min(ratio · A, clipped ratio · A)]` over all events, (...)."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def trust_region_objective(
    new: Gaussian,
    old: Gaussian,
    log_prob: LogProb,
    old_log_prob: Tensor,
    advantages: Tensor,
    mean_bound: float,
    covariance_bound: float,
    pull_weight: float = 1.0,
) -> tuple[Tensor, GaussianProjection[Gaussian]]:
    """TCE's loss: the ratio of the projected policy, and the pull of the network's own policy to the projected one.

    Args:
        new: p̃, what the network gives now, for B episodes.
        old: p, which made the episodes, without gradient.
        log_prob: Of the batch's events.
        old_log_prob: What it gives for `old`, (...).
        advantages: Of the events, (...).
        mean_bound: ε_μ > 0 in nats.
        covariance_bound: ε_Σ > 0 in nats.
        pull_weight: α ≥ 0.

    Returns:
        The loss, a scalar, and the projection.
    """
    projection = project_kl(new, old, mean_bound, covariance_bound)
    ratio = ratio_loss(log_prob(projection.policy) - old_log_prob, advantages)
    return ratio + pull_weight * trust_region_loss(new, projection).mean(), projection
