"""Bounds that do not depend on what the trust region does: fixed and annealed ones."""

from __future__ import annotations

import math
from abc import abstractmethod

from troll.trust_region.bounds.bound import Bound, BoundStatistics, positive


class Fixed(Bound):
    """Keeps ε at `kl_bound`."""

    kind = "fixed"

    def __init__(self, kl_bound: float, total_steps: int | None = None) -> None:
        self._kl_bound = kl_bound

    @property
    def value(self) -> float:
        """ε in nats, always the same."""
        return self._kl_bound

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Changes nothing."""


class Schedule(Bound):
    """Moves ε from `kl_bound` to `end` over the first `steps` optimiser steps, and keeps it there.

    Args:
        kl_bound: ε at the start, finite, in nats.
        total_steps: Optimiser steps of the whole training; needed unless `steps` is a number of steps.
        end: ε at the end, above 0 and finite, in nats.
        steps: A number of optimiser steps (an integer), a fraction of the training (in (0, 1)), or None for all of it.

    Raises:
        ValueError: If a value is out of its range.
    """

    _changing = ("step",)

    def __init__(
        self, kl_bound: float, total_steps: int | None = None, *, end: float, steps: float | None = None
    ) -> None:
        self._start, self._end = positive("kl_bound", kl_bound), positive("end", end)
        self._steps = _duration(steps, total_steps)
        self._step = 0

    @staticmethod
    @abstractmethod
    def _way(done: float) -> float:
        """Maps the share of steps made, in [0, 1], to the share of the way from start to end, in [0, 1]."""

    @property
    def value(self) -> float:
        """ε after the steps made so far, in nats."""
        way = self._way(min(self._step / self._steps, 1.0))
        return self._start * (1 - way) + self._end * way

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves on to `step`; its statistics are not used."""
        self._step = step


class Linear(Schedule):
    """Moves ε in a straight line; see `Schedule`."""

    kind = "linear"

    @staticmethod
    def _way(done: float) -> float:
        return done


class Cosine(Schedule):
    """Moves ε along half a cosine, slowly at both ends; see `Schedule`."""

    kind = "cosine"

    @staticmethod
    def _way(done: float) -> float:
        return 0.5 * (1 - math.cos(math.pi * done))


def _duration(steps: float | None, total_steps: int | None) -> float:
    """The length of a schedule in optimiser steps."""
    if steps is not None and not (isinstance(steps, int) and steps >= 1) and not 0 < steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, a fraction in (0, 1), or None, got {steps}")
    if isinstance(steps, int):
        return steps
    if total_steps is None or total_steps < 1:
        raise ValueError(
            f"total_steps must be at least 1 if steps is {'None' if steps is None else 'a fraction'}, got {total_steps}"
        )
    return total_steps * (1.0 if steps is None else steps)
