"""The pull: the term of the loss that moves the network itself, where a projection bounds only what the loss sees."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.gaussian.divergence import kl
from troll.gaussian.policy import Policy, spread_of
from troll.gaussian.projection import GaussianProjection


def trust_region_loss(new: Policy, projection: GaussianProjection[Policy]) -> Tensor:
    """KL(p̃ ‖ ⌊q⌋) at every state, (...), in nats: 0, with a gradient of 0, where nothing is projected.

    ⌊·⌋ stops the gradient. Add its mean over states to the loss, with a weight. For a covariance that all states
    share, each state has the whole of its pull, so that the mean has it once.

    Args:
        new: p̃, the policy that was projected; means (..., d).
        projection: What became of it.

    Raises:
        ValueError: If the two do not fit.
    """
    target = projection.policy
    pull = kl(new, type(target)(target.mean.detach(), spread_of(target).detach()))
    return torch.where(projection.mean_projected | projection.covariance_projected, pull, 0.0)
