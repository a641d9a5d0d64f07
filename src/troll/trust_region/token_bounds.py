"""Bounds ε (`kl_bound`) that differ between the tokens of a batch.

Both functions turn a bound into a tensor of bounds that `project` and `trust_region_step` take as `kl_bound`. Each
accepts the other's result, and the `value` of any bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from troll.trust_region.checks import check_positive
from troll.trust_region.probabilities import as_float


def entropy_scaled(
    kl_bound: float | Tensor,
    entropy: Tensor,
    reference_entropy: float | Tensor,
    *,
    exponent: float = 1.0,
    limits: tuple[float, float] = (0.1, 10.0),
) -> Tensor:
    """Per-token bounds `ε_t = ε · clamp((H_t/H̄)^exponent, limits)`: wider where the old policy's entropy is high.

    Args:
        kl_bound: ε in nats; a float, or a tensor that broadcasts with the entropies.
        entropy: H_t ≥ 0 of the **old** policy, (...), in nats. With the new policy's entropy, a token could widen its
            own bound. NaN (a token outside the mask) leaves ε as it is.
        reference_entropy: H̄ ≥ 0, a typical H_t, such as the mean over the batch's tokens and processes: a float, or a
            tensor that broadcasts. Where H_t and H̄ are both 0, ε stays as it is.
        exponent: The power of the ratio H_t/H̄, finite: 0 switches the scaling off, and an exponent below 0 narrows the
            bound where the entropy is high.
        limits: The smallest and the largest factor, `0 < lower ≤ upper < inf`.

    Returns:
        The bounds in nats, in the shape to which the arguments broadcast.

    Raises:
        ValueError: If a value is out of its range.
    """
    if not math.isfinite(exponent):
        raise ValueError(f"exponent must be finite, got {exponent}")
    if not 0 < limits[0] <= limits[1] < math.inf:
        raise ValueError(f"limits must be 0 < lower <= upper < inf, got {limits}")
    entropy = as_float(entropy)
    # A float is checked on the host: no wait for the device.
    valid = reference_entropy >= 0
    if not (bool(valid.all()) if isinstance(valid, Tensor) else valid):
        raise ValueError(f"reference_entropy must be at least 0, got {reference_entropy}")
    # Rounding may put the entropy of a certain token below 0, where most powers do not exist.
    factor = (entropy.clamp(min=0) / reference_entropy).pow(exponent).clamp(*limits)
    return kl_bound * factor.masked_fill(factor.isnan(), 1.0)


def by_advantage(kl_bound: float | Tensor, advantages: Tensor, *, negative_kl_bound_ratio: float) -> Tensor:
    """Per-token bounds: ε, and `negative_kl_bound_ratio · ε` where the advantage is negative.

    A ratio below 1 keeps tokens with a negative advantage closer to the old policy than others.

    Args:
        kl_bound: ε in nats; a float, or a tensor that broadcasts with the advantages.
        advantages: The tokens' advantages, (B, T) or (N,); or (B, 1), one for each sequence.
        negative_kl_bound_ratio: The factor of ε where the advantage is negative; above 0 and finite.

    Returns:
        The bounds in nats, in the shape to which the arguments broadcast.

    Raises:
        ValueError: If the ratio is out of its range.
    """
    check_positive("negative_kl_bound_ratio", negative_kl_bound_ratio)
    return kl_bound * torch.ones_like(as_float(advantages)).masked_fill(advantages < 0, negative_kl_bound_ratio)
