"""PPO's rule for the weight of a divergence in the loss: α of a pull, β of a KL penalty."""

from __future__ import annotations

#: β changes where the KL divergence differs from its target by more than the first factor; it changes by the second.
TARGET_RATIO, WEIGHT_FACTOR = 1.5, 2.0
#: β stays within this factor of its initial value: a target out of reach would double or halve it without end.
WEIGHT_RANGE = 2.0**10


def adapted(weight: float, kl: float, target: float) -> float:
    """β after a rollout (arXiv 1707.06347, section 4): β/2 if the KL is below d/1.5, and 2β if it is above 1.5 d.

    Args:
        weight: β before the rollout.
        kl: The mean divergence measured in the rollout, in nats.
        target: d, the divergence to reach, in nats.

    Returns:
        The new β.
    """
    if kl < target / TARGET_RATIO:
        return weight / WEIGHT_FACTOR
    return weight * WEIGHT_FACTOR if kl > target * TARGET_RATIO else weight


def limited(weight: float, initial: float) -> float:
    """β limited to within a factor `WEIGHT_RANGE` of its initial value; in the paper there is no limit."""
    return min(max(weight, initial / WEIGHT_RANGE), initial * WEIGHT_RANGE)
