"""The policy's loss on a batch of episodes: the ratio of events times their advantages, with a limit on the update.

Events are the segments of a movement, each with its own advantage, or whole episodes as black boxes. A trust region
projects the policy before the ratio is computed, and pulls the network to the projection; a clip limits the ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from troll.gaussian import Gaussian, GaussianProjection, project_kl, trust_region_loss

#: A function from a policy to the log-density of each event of the batch, (...), in nats.
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
        new: p̃, the network's current policy, for B episodes.
        old: p, the policy that made the episodes, without gradient.
        log_prob: The log-density of the batch's events under a policy.
        old_log_prob: `log_prob(old)`, (...).
        advantages: The advantages of the events, (...).
        mean_bound: ε_μ > 0, the bound on the KL of the means, in nats.
        covariance_bound: ε_Σ > 0, the bound on the KL of the covariances, in nats.
        pull_weight: α ≥ 0, the weight of the pull.

    Returns:
        The loss, a scalar, and the projection.
    """
    projection = project_kl(new, old, mean_bound, covariance_bound)
    ratio = ratio_loss(log_prob(projection.policy) - old_log_prob, advantages)
    return ratio + pull_weight * trust_region_loss(new, projection).mean(), projection
