"""What one run's learning curve says: how much it learned, how fast, and whether it lost it again.

A curve is the training success of each rollout, in [0, 1] and in order, at least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

#: Rollouts in a running mean: one rollout has too much noise to judge a run by.
WINDOW = 5


def area_under_curve(curve: Sequence[float]) -> float:
    """The mean success over all rollouts, in [0, 1]: high for a run that learns early and keeps what it learned."""
    return fmean(curve)


def rollouts_to(curve: Sequence[float], level: float) -> int | None:
    """How many rollouts it took until the last five had a mean success of at least `level`; None if they never had."""
    return next((end for end, mean in _running_means(curve) if mean >= level), None)


def collapsed(final: float, curve: Sequence[float]) -> bool:
    """Whether a run lost more than half of what it had learned.

    Args:
        final: Held-out success after training.
        curve: Its best mean over five rollouts is what the run had learned; below 5 % there was nothing to lose.
    """
    best = max(mean for _, mean in _running_means(curve))
    return best >= 0.05 and final < best / 2


def _running_means(curve: Sequence[float]) -> list[tuple[int, float]]:
    """The mean of each five rollouts in a row (of all, if there are fewer), with the number of the last of them."""
    width = min(WINDOW, len(curve))
    return [(end, fmean(curve[end - width : end])) for end in range(width, len(curve) + 1)]
