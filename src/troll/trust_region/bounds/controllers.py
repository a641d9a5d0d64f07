"""Bounds that adapt: controllers, which hold something that is measured at a target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from troll.trust_region.bounds.bound import Bound, BoundStatistics, positive

#: Within these the projection meets ε in float32, so a controller stays there unless told otherwise.
CONTROLLED_RANGE = (1e-3, 1.0)


class Controller(Bound):
    """Holds a measured quantity m at a target by integral control in log ε.

    After every step, with the running mean m̄ of the measurements,

        log ε  ←  log ε ± rate · clamp(m̄ / target − 1, −1, 1),

    and ε is kept within [minimum, maximum]. The sign is + where a larger ε makes m smaller. The error is linear in m̄
    because m is small after some updates of a rollout and large after others (0 at the first, where the policies are
    equal): it is their mean that is to be at the target. Where m̄ answers to log ε with slope g relative to the target,
    the loop is stable for ``rate · g < 2 (1 + smoothing)/(1 − smoothing)``, 38 by default, if m answers at once; if it
    answers d steps late, roughly for ``rate · g · (d + 1/(1 − smoothing)) < 1``.

    Args:
        kl_bound: ε at the start, within [minimum, maximum].
        total_steps: Not used.
        target: What m̄ is to be.
        rate: Above 0; no step changes ε by more than a factor of e^rate.
        smoothing: Weight of the past in the running mean, in [0, 1): it goes back about 1/(1 − smoothing) steps, which
            should be no fewer than the updates per rollout.
        minimum: The smallest ε, above 0.
        maximum: The largest, finite.

    Raises:
        ValueError: On values out of these ranges.
    """

    #: +1 where a larger ε makes the measurement smaller.
    _sign: ClassVar[int]
    _largest_target: ClassVar[float]

    def __init__(
        self,
        kl_bound: float,
        total_steps: int | None = None,
        *,
        target: float,
        rate: float = 0.05,
        smoothing: float = 0.9,
        minimum: float = CONTROLLED_RANGE[0],
        maximum: float = CONTROLLED_RANGE[1],
    ) -> None:
        if not 0 < target < self._largest_target:
            raise ValueError(f"target must be above 0 and below {self._largest_target}, got {target}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
        if not 0 < minimum <= maximum < math.inf:
            raise ValueError(f"minimum and maximum must be 0 < minimum <= maximum < inf, got {minimum} and {maximum}")
        if not minimum <= kl_bound <= maximum:
            raise ValueError(f"kl_bound must be within minimum and maximum, [{minimum}, {maximum}], got {kl_bound}")
        self._target, self._rate, self._smoothing = target, positive("rate", rate), smoothing
        self._limits = (minimum, maximum)
        self._value = kl_bound
        # A weighted sum of the measurements, and of their weights: the first ones count in full.
        self._measured = self._weight = 0.0

    @staticmethod
    @abstractmethod
    def _measurement(statistics: BoundStatistics) -> float:
        """The quantity that is held."""

    @property
    def value(self) -> float:
        """ε, within [minimum, maximum]."""
        return self._value

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves ε towards where the measurement meets its target."""
        self._measured = self._smoothing * self._measured + (1 - self._smoothing) * self._measurement(statistics)
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        error = min(max(self._measured / self._weight / self._target - 1, -1.0), 1.0)
        # The integral is ε itself, so a limit stops it: nothing winds up behind it.
        self._value = _clamped(self._value * math.exp(self._sign * self._rate * error), self._limits)

    def _state(self) -> dict[str, float | int]:
        return {"value": self._value, "measured": self._measured, "weight": self._weight}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._value = _clamped(float(state["value"]), self._limits)
        self._measured, self._weight = float(state["measured"]), float(state["weight"])


class HoldProjectedFraction(Controller):
    """Raises ε where more than `target` of the tokens are projected, lowers it where fewer are; see the parent."""

    kind = "hold_projected_fraction"
    _sign = 1
    _largest_target = 1.0

    @staticmethod
    def _measurement(statistics: BoundStatistics) -> float:
        return statistics.projected_fraction


class HoldKL(Controller):
    """Lowers ε where the network's mean KL(p̃ ‖ p) is above `target`, raises it where it is below; see the parent.

    ε bounds q, and the network only follows it: mean KLs beyond what it does by itself are out of reach, and ε then
    ends at a limit.
    """

    kind = "hold_kl"
    _sign = -1
    _largest_target = math.inf

    @staticmethod
    def _measurement(statistics: BoundStatistics) -> float:
        return statistics.kl


def _clamped(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
