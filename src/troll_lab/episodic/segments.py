"""Segments of movements, and their advantages from the steps of an episode."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def random_cuts(num_steps: int, points: int, generator: torch.Generator | None = None) -> Tensor:
    """Cuts an episode at equally spaced time points with a random phase, and at its start and end.

    Every reward then belongs to one segment. Between the first and the last point all segments have the same length;
    those at both ends are shorter, or longer if `points - 1` does not divide the steps.

    Args:
        num_steps: T, the number of steps of an episode.
        points: The number of points, from 2 to T, such as 25.
        generator: The random numbers for the phase.

    Returns:
        Indices from 0 to T, ascending, (K + 1,) int64; K is between `points - 1` and `points + 1`.

    Raises:
        ValueError: If `points` is out of its range.
    """
    if not 2 <= points <= num_steps:
        raise ValueError(f"points must be from 2 to the number of steps {num_steps}, got {points}")
    length = num_steps // (points - 1)
    free = num_steps - length * (points - 1)
    phase = int(torch.randint(max(length, free + 1), (), generator=generator))
    inner = phase + length * torch.arange(points)
    ends = torch.tensor([0, num_steps])
    return torch.cat([inner[inner < num_steps], ends]).unique()


def segment_advantages(rewards: Tensor, values: Tensor, cuts: Tensor, discount: float = 1.0) -> Tensor:
    """The advantage `Σ γ^i r + γ^N V(end) − V(start)` of each segment of N steps.

    Args:
        rewards: The rewards, (B, T).
        values: The values of the states before each step and after the last one, (B, T + 1); 0 where an episode ends.
        cuts: Ends of K segments, (K + 1,), from `random_cuts`.
        discount: γ in (0, 1].

    Returns:
        The advantages, (B, K).
    """
    start, end = cuts[:-1], cuts[1:]
    age = discount ** torch.arange(rewards.shape[-1] + 1, dtype=rewards.dtype)
    # Each sum by itself: a difference of sums from the first step on would be divided by its discount.
    gained = torch.stack([rewards[:, a:b] @ age[: b - a] for a, b in pairwise(cuts.tolist())], -1)
    return gained + age[end - start] * values[:, end] - values[:, start]


def generalised_advantages(rewards: Tensor, values: Tensor, discount: float, decay: float) -> Tensor:
    """Generalised advantage estimates of single steps, `Σ_i (γλ)^i δ_{t+i}`, `δ_t = r_t + γ V_{t+1} − V_t`.

    The sum of the estimates and the values is the target of the critic.

    Args:
        rewards: The rewards, (B, T).
        values: The values, (B, T + 1), 0 where an episode ends.
        discount: γ in (0, 1].
        decay: λ in [0, 1].

    Returns:
        The advantages, (B, T).
    """
    errors = rewards + discount * values[:, 1:] - values[:, :-1]
    advantages, following = [], torch.zeros_like(errors[:, 0])
    for error in reversed(errors.unbind(-1)):
        following = error + discount * decay * following
        advantages.append(following)
    return torch.stack(advantages[::-1], -1)


def normalised(advantages: Tensor) -> Tensor:
    """Scales advantages to mean 0 and standard deviation 1 over all entries; equal ones become zero."""
    centred = advantages - advantages.mean()
    return centred / centred.square().mean().sqrt().clamp(min=1e-8)
