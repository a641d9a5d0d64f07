"""A lower bound on the entropy of a Gaussian policy, which keeps exploration alive."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from troll.gaussian.policy import Policy, spread_of
from troll.trust_region.checks import expanded


def project_entropy(policy: Policy, minimum: float | Tensor) -> Policy:
    """Raises the entropy of a policy to a minimum, where it is lower: `min_q KL(q ‖ p̃)` subject to `H(q) ≥ β`.

    The solution scales all standard deviations by the same factor, `Σ_q = Σ · exp(2 (β − H)/d)`. Covariances with
    enough entropy are returned bit for bit. Apply it before the trust region, which then holds exactly; the entropy may
    end slightly below the minimum.

    β may change during training. `entropy_of_scale` turns a standard deviation, in the units of the actions, into β: a
    schedule of a positive number, where β itself may be negative.

    Args:
        policy: The policy to change; gradients flow through.
        minimum: β in nats (it may be negative), a float or a tensor that broadcasts to the batch of covariances.

    Raises:
        ValueError: If the minimum is NaN or infinite, or does not broadcast.
    """
    entropy, d = policy.entropy, policy.mean.shape[-1]
    bound = minimum.detach().to(entropy) if isinstance(minimum, Tensor) else entropy.new_full((), minimum)
    if bound.device.type == "cpu" and not bool(bound.isfinite().all()):
        raise ValueError(f"minimum must be finite, got {minimum}")
    bound = expanded("minimum", bound, entropy.shape)
    low = entropy.detach() < bound
    growth = torch.where(low, torch.exp((bound - entropy) / d), 1.0)
    spread = spread_of(policy)
    event = (1,) * (spread.dim() - entropy.dim())
    growth, low = growth.view(*growth.shape, *event), low.view(*low.shape, *event)
    return type(policy)(policy.mean, torch.where(low, spread * growth, spread))


def entropy_of_scale(scale: float, dimension: int) -> float:
    """The entropy of independent actions with one standard deviation, in nats: `d/2 · log(2πe · scale²)`.

    Args:
        scale: Standard deviation, above 0, in the units of the actions.
        dimension: d, the number of actions, at least 1.

    Raises:
        ValueError: If an argument is out of its range.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, got {scale}")
    if dimension < 1:
        raise ValueError(f"dimension must be at least 1, got {dimension}")
    return dimension * (0.5 * math.log(2 * math.pi * math.e) + math.log(scale))
