"""Schedules of ε (`kl_bound`) over training: fixed, annealed, by the age of a rollout, or adaptive.

`token_bounds` has bounds that differ between the tokens of a batch.

A `Bound` is plain Python: the same numbers give the same `value` on every process, and its state is JSON. To add a
kind, write a class and name it in `BOUNDS`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from troll.trust_region.checks import check_choice, check_positive

#: The range of ε that the projection meets in float32, and a controller's default limits.
CONTROLLED_RANGE = (1e-3, 1.0)


@dataclass(frozen=True)
class BoundStatistics:
    """Measurements of the trust region in one optimiser step, over the tokens of all its micro-batches and processes.

    Attributes:
        projected_fraction: The fraction of tokens that were projected, in [0, 1].
        kl: KL(p̃ ‖ p) before the projection, the mean over tokens, in nats.

    Raises:
        ValueError: On a fraction outside [0, 1], or a KL that is negative or not finite.
    """

    projected_fraction: float
    kl: float

    def __post_init__(self) -> None:
        if not 0 <= self.projected_fraction <= 1:
            raise ValueError(f"projected_fraction must be in [0, 1], got {self.projected_fraction}")
        if not 0 <= self.kl < math.inf:
            raise ValueError(f"kl must be finite and at least 0, got {self.kl}")


class Bound(ABC):
    """ε over training, one number at a time. [make_bound][troll.bounds.make_bound] makes one.

    A subclass takes `kl_bound` and `total_steps`, and its options as keywords, which `make_bound` checks.
    """

    kind: ClassVar[str]
    #: The numbers that change during training: their names in a state, which are attributes after an underscore.
    _changing: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def value(self) -> float:
        """ε now, above 0, in nats."""

    @abstractmethod
    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Adapts ε; call it after every optimiser step, with the same numbers on all processes.

        Args:
            step: How many steps have been made, this one included.
            statistics: Measurements of the trust region in this step.
        """

    def set_age(self, updates: int) -> None:  # noqa: B027 (most bounds do not depend on it)
        """Sets the age of the rollout of the next step; call it before every optimiser step, on all processes.

        Args:
            updates: The number of optimiser steps since the rollout was sampled, at least 0.
        """

    def state_dict(self) -> dict[str, float | int | str]:
        """The state that a checkpoint needs to resume exactly; it survives JSON bit for bit."""
        return {"kind": self.kind} | {name: getattr(self, f"_{name}") for name in self._changing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of a bound of the same kind, but not its options.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: If the state is of another kind of bound, or is incomplete.
        """
        if state.get("kind") != self.kind:
            raise ValueError(f"state must be that of a {self.kind!r} bound, got {state.get('kind')!r}")
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(f"state must hold {', '.join(expected)}, got {', '.join(state)}")
        for name in self._changing:
            setattr(self, f"_{name}", state[name])


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


class Linear(Bound):
    """Moves ε in a straight line from `kl_bound` to `end` over the first `steps` optimiser steps, and keeps it there.

    Args:
        kl_bound: ε at the start, finite, in nats.
        total_steps: Optimiser steps of the whole training; needed unless `steps` is a number of steps.
        end: ε at the end, above 0 and finite, in nats.
        steps: A number of optimiser steps (an integer), a fraction of the training (in (0, 1)), or None for all of it.

    Raises:
        ValueError: If a value is out of its range.
    """

    kind = "linear"
    _changing = ("step",)

    def __init__(
        self, kl_bound: float, total_steps: int | None = None, *, end: float, steps: float | None = None
    ) -> None:
        check_positive("kl_bound", kl_bound)
        check_positive("end", end)
        self._start, self._end, self._step = kl_bound, end, 0
        if steps is not None and not (isinstance(steps, int) and steps >= 1) and not 0 < steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, a fraction in (0, 1), or None, got {steps}")
        if isinstance(steps, int):
            self._steps: float = steps
        elif total_steps is None or total_steps < 1:
            given = "None" if steps is None else "a fraction"
            raise ValueError(f"total_steps must be at least 1 if steps is {given}, got {total_steps}")
        else:
            self._steps = total_steps * (1.0 if steps is None else steps)

    @staticmethod
    def _way(done: float) -> float:
        """Maps the share of steps made, in [0, 1], to the share of the way from start to end, in [0, 1]."""
        return done

    @property
    def value(self) -> float:
        """ε after the steps made so far, in nats."""
        way = self._way(min(self._step / self._steps, 1.0))
        return self._start * (1 - way) + self._end * way

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves on to `step`; its statistics are not used."""
        self._step = step


class Cosine(Linear):
    """Moves ε from `kl_bound` to `end` along half a cosine, slowly at both ends; arguments as for `Linear`."""

    kind = "cosine"

    @staticmethod
    def _way(done: float) -> float:
        return 0.5 * (1 - math.cos(math.pi * done))


class ByAge(Linear):
    """Moves ε in a straight line from `kl_bound` for fresh rollouts to `end` for those of age `steps`, and older ones.

    The age is the number of optimiser steps since the rollout was sampled, including those made with the rollout.

    Args:
        kl_bound: ε at age 0, finite, in nats.
        total_steps: Not used; all bounds take it.
        end: ε from age `steps` on, above 0 and finite, in nats.
        steps: An age, an integer of at least 1.

    Raises:
        ValueError: If a value is out of its range.
    """

    kind = "by_age"

    def __init__(self, kl_bound: float, total_steps: int | None = None, *, end: float, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {steps}")
        super().__init__(kl_bound, end=end, steps=steps)

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Changes nothing."""

    def set_age(self, updates: int) -> None:
        """Sets the age, which may also fall, when a new rollout begins."""
        self._step = updates


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
    #: The field of `BoundStatistics` that is held at the target.
    _quantity: ClassVar[str]
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
        check_positive("rate", rate)
        self._target, self._rate, self._smoothing = target, rate, smoothing
        self._limits = (minimum, maximum)
        self._value = kl_bound
        # A weighted sum of the measurements, and of their weights: the first ones count in full.
        self._measured = self._weight = 0.0

    @property
    def value(self) -> float:
        """ε now, within [minimum, maximum], in nats."""
        return self._value

    def update(self, step: int, statistics: BoundStatistics) -> None:
        """Moves ε so that the measurement approaches its target."""
        measurement = getattr(statistics, self._quantity)
        self._measured = self._smoothing * self._measured + (1 - self._smoothing) * measurement
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        error = min(max(self._measured / self._weight / self._target - 1, -1.0), 1.0)
        # ε itself is the integral, so limiting ε also limits the integral: no wind-up.
        self._value = _clamped(self._value * math.exp(self._sign * self._rate * error), self._limits)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of a bound of the same kind, but not its options; ε is kept within this one's limits."""
        super().load_state_dict(state)
        self._value = _clamped(self._value, self._limits)


class HoldProjectedFraction(Controller):
    """Holds the fraction of projected tokens at `target`: raises ε while it is larger. See `Controller`."""

    kind = "hold_projected_fraction"
    _quantity = "projected_fraction"
    _sign = 1
    _largest_target = 1.0


class HoldKL(Controller):
    """Holds the network's mean KL(p̃ ‖ p) at `target`, in nats: lowers ε while it is larger. See `Controller`.

    ε bounds q, and the network only follows q. A target above the KL that the network reaches without a bound cannot be
    met; ε then ends at a limit.
    """

    kind = "hold_kl"
    _quantity = "kl"
    _sign = -1
    _largest_target = math.inf


BOUNDS: dict[str, Callable[..., Bound]] = {
    bound.kind: bound for bound in (Fixed, Linear, Cosine, ByAge, HoldProjectedFraction, HoldKL)
}


def make_bound(name: str, kl_bound: float, *, total_steps: int | None = None, **options: Any) -> Bound:
    """Makes the bound that is registered under a name.

    Args:
        name: `fixed`, `linear`, `cosine`, `by_age`, `hold_projected_fraction` or `hold_kl`.
        kl_bound: ε at the start, above 0, in nats.
        total_steps: Optimiser steps of the whole training, if known.
        **options: Numbers: `end` and `steps` for `linear`, `cosine` and `by_age`; `target`, `rate`, `smoothing`,
            `minimum` and `maximum` for the two controllers, `hold_projected_fraction` and `hold_kl`.

    Returns:
        The bound, whose `value` is `kl_bound` before the first step.

    Raises:
        ValueError: On an unknown name, an unknown or missing option, or a value out of its range.
    """
    check_choice("bound", name, BOUNDS)
    if not kl_bound > 0:
        raise ValueError(f"kl_bound must be above 0, got {kl_bound}")
    parameters = inspect.signature(BOUNDS[name]).parameters.values()
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"the {name!r} bound takes {', '.join(known) or 'no options'}, got {', '.join(unknown)}")
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise ValueError(f"the {name!r} bound needs {', '.join(missing)}, got {', '.join(options) or 'no options'}")
    for option, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number and not (value is None and known[option].default is None):
            raise ValueError(f"{option} must be a number, got {value!r}")
    return BOUNDS[name](kl_bound, total_steps, **options)


def _clamped(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
