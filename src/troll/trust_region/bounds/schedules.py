"""Bounds that do not look at what the trust region does: fixed and annealed ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from troll.trust_region.bounds.bound import Bound, BoundStatistics, positive


class Fixed(Bound):
    """``kl_bound``, always."""

    kind = "fixed"

    def __init__(self, kl_bound: float, total_steps: int | None = None) -> None:
        self._kl_bound = kl_bound

    @property
    def value(self) -> float:
        """``kl_bound``."""
        return self._kl_bound

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Changes nothing."""

    def _state(self) -> dict[str, float | int]:
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        pass


class Schedule(Bound):
    """From ``kl_bound`` to `end` over the first `steps` optimiser steps, and `end` from there on.

    Args:
        kl_bound: ε at the start, finite.
        total_steps: Optimiser steps of the whole training; needed unless `steps` is a number of steps.
        end: ε at the end, above 0 and finite.
        steps: A number of optimiser steps (an integer), a fraction of the training (in (0, 1)), or None for all of it.

    Raises:
        ValueError: On values out of these ranges.
    """

    def __init__(
        self, kl_bound: float, total_steps: int | None = None, *, end: float, steps: float | None = None
    ) -> None:
        self._start, self._end = positive("kl_bound", kl_bound), positive("end", end)
        self._steps = _duration(steps, total_steps)
        self._step = 0

    @staticmethod
    @abstractmethod
    def _way(done: float) -> float:
        """How much of the way from start to end lies behind when `done` of the steps do; [0, 1] to [0, 1]."""

    @property
    def value(self) -> float:
        """ε after the steps made so far."""
        way = self._way(min(self._step / self._steps, 1.0))
        return self._start * (1 - way) + self._end * way

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves on to `step`; what it measured does not matter."""
        self._step = step

    def _state(self) -> dict[str, float | int]:
        return {"step": self._step}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])


class Linear(Schedule):
    """In a straight line; see `Schedule`."""

    kind = "linear"

    @staticmethod
    def _way(done: float) -> float:
        return done


class Cosine(Schedule):
    """Along half a cosine: slow at both ends; see `Schedule`."""

    kind = "cosine"

    @staticmethod
    def _way(done: float) -> float:
        return 0.5 * (1 - math.cos(math.pi * done))


def _duration(steps: float | None, total_steps: int | None) -> float:
    """Of a schedule, in optimiser steps."""
    if steps is not None and not (isinstance(steps, int) and steps >= 1) and not 0 < steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, a fraction in (0, 1), or None, got {steps}")
    if isinstance(steps, int):
        return steps
    if total_steps is None or total_steps < 1:
        raise ValueError(
            f"total_steps must be at least 1 where steps is {'None' if steps is None else 'a fraction'}, "
            f"got {total_steps}"
        )
    return total_steps * (1.0 if steps is None else steps)
