"""The pull: the term of the loss that moves the network itself towards its projection."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.gaussian.divergence import kl
from troll.gaussian.policy import Policy, spread_of
from troll.gaussian.projection import GaussianProjection


def trust_region_loss(new: Policy, projection: GaussianProjection[Policy]) -> Tensor:
    """KL(p̃ ‖ ⌊q⌋) at every state, (...), in nats: 0, with a gradient of 0, where nothing is projected.

    ⌊·⌋ stops the gradient. Add the mean over states to the loss, with a weight. If all states share a covariance, its
    pull is in the term of every state, so that the mean contains it once.

    Args:
        new: p̃, the policy that was projected; means (..., d).
        projection: The projection of p̃.

    Raises:
        ValueError: If the two do not fit.
    """
    target = projection.policy
    pull = kl(new, type(target)(target.mean.detach(), spread_of(target).detach()))
    return torch.where(projection.mean_projected | projection.covariance_projected, pull, 0.0)
