"""Bounds that adapt: controllers, which hold a measured quantity at a target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from troll.trust_region.bounds.bound import Bound, BoundStatistics, positive

#: The range of ε that the projection meets in float32, and a controller's default limits.
CONTROLLED_RANGE = (1e-3, 1.0)


class Controller(Bound):
    """Holds a measured quantity m at a target by integral control in log ε.

    After every step, with the running mean m̄ of the measurements,

        log ε  ←  log ε ± rate · clamp(m̄ / target − 1, −1, 1),

    and ε is kept within [minimum, maximum]. The sign is + if a larger ε makes m smaller. The error is linear in m̄
    because m is small after some updates of a rollout and large after others (0 at the first, where the policies are
    equal): their mean has to meet the target. If m̄ responds to log ε with slope g relative to the target, the loop is
    stable for `rate · g < 2 (1 + smoothing)/(1 − smoothing)`, 38 by default, if m responds at once; if it responds d
    steps late, roughly for `rate · g · (d + 1/(1 − smoothing)) < 1`.

    Args:
        kl_bound: ε at the start, within [minimum, maximum], in nats.
        total_steps: Not used; all bounds take it.
        target: The value that m̄ has to meet: a fraction below 1, or a KL in nats.
        rate: The gain, above 0: no step changes ε by more than a factor of e^rate.
        smoothing: Weight of the past in the running mean, in [0, 1): it goes back about 1/(1 − smoothing) steps, which
            should be no fewer than the updates per rollout.
        minimum: The smallest ε, above 0.
        maximum: The largest ε, finite.

    Raises:
        ValueError: If a value is out of its range.
    """

    _changing = ("value", "measured", "weight")
    #: +1 if a larger ε makes the measurement smaller, else −1.
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
        """The quantity that is held at the target."""

    @property
    def value(self) -> float:
        """ε now, within [minimum, maximum], in nats."""
        return self._value

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves ε so that the measurement approaches its target."""
        self._measured = self._smoothing * self._measured + (1 - self._smoothing) * self._measurement(statistics)
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        error = min(max(self._measured / self._weight / self._target - 1, -1.0), 1.0)
        # The integral is ε itself, so a limit stops it: nothing winds up behind it.
        self._value = _clamped(self._value * math.exp(self._sign * self._rate * error), self._limits)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of a bound of the same kind, but not its options; ε is kept within this one's limits."""
        super().load_state_dict(state)
        self._value = _clamped(self._value, self._limits)


class HoldProjectedFraction(Controller):
    """Holds the fraction of projected tokens at `target`: raises ε while it is larger. See `Controller`."""

    kind = "hold_projected_fraction"
    _sign = 1
    _largest_target = 1.0

    @staticmethod
    def _measurement(statistics: BoundStatistics) -> float:
        return statistics.projected_fraction


class HoldKL(Controller):
    """Holds the network's mean KL(p̃ ‖ p) at `target`, in nats: lowers ε while it is larger. See `Controller`.

    ε bounds q, and the network only follows q: a mean KL above what the network reaches without a bound is out of
    reach, and ε then ends at a limit.
    """

    kind = "hold_kl"
    _sign = -1
    _largest_target = math.inf

    @staticmethod
    def _measurement(statistics: BoundStatistics) -> float:
        return statistics.kl


def _clamped(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
