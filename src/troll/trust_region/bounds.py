"""What varies ε (`kl_bound`): over training, one number at a time; and over the tokens of a batch.

Over training, a :class:`Bound` is asked for its `value` and told, after every optimiser step, what the trust region
did. It is plain Python: fed the same numbers it is the same on every process, and its state is JSON. To add a kind,
write a class and name it in :data:`BOUNDS`.

Over tokens, :func:`entropy_scaled` and :func:`by_advantage` turn a bound into a tensor of bounds that ``project`` and
``trust_region_log_probs`` take as `kl_bound`. They apply to each other's results, and to any `value`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from troll.trust_region.policy import SparsePolicy
from troll.trust_region.support import as_float

State = dict[str, float | int | str]

#: Within these the projection meets ε in float32, so a controller stays there unless told otherwise.
CONTROLLED_RANGE = (1e-3, 1.0)


@dataclass(frozen=True)
class BoundStatistics:
    """What the trust region did in one optimiser step, over the tokens of all its micro-batches and processes.

    Attributes:
        projected_fraction: How many of the tokens were projected, in [0, 1].
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
    """ε as training goes on. Make one with :func:`make_bound`.

    A subclass takes ``kl_bound`` and ``total_steps``, and its options as keywords, which :func:`make_bound` checks.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def value(self) -> float:
        """ε now, above 0, in nats."""

    @abstractmethod
    def update(self, step: int, statistics: BoundStatistics) -> None:
        """To be called after every optimiser step, with the number of steps made and what that step measured."""

    @abstractmethod
    def _state(self) -> dict[str, float | int]:
        """What changes as training goes on."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `_state` returned."""

    def state_dict(self) -> State:
        """What a checkpoint needs to resume exactly; survives JSON bit for bit."""
        return {"kind": self.kind, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of a bound of the same kind. Options are not part of it: this bound's own hold.

        Raises:
            ValueError: On the state of another kind of bound, or one that lacks something.
        """
        if state.get("kind") != self.kind:
            raise ValueError(f"state must be that of a {self.kind!r} bound, got {state.get('kind')!r}")
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(f"state must hold {', '.join(expected)}, got {', '.join(state)}")
        self._restore(state)


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
        self._start, self._end = _positive("kl_bound", kl_bound), _positive("end", end)
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
    """In a straight line; see :class:`Schedule`."""

    kind = "linear"

    @staticmethod
    def _way(done: float) -> float:
        return done


class Cosine(Schedule):
    """Along half a cosine: slow at both ends; see :class:`Schedule`."""

    kind = "cosine"

    @staticmethod
    def _way(done: float) -> float:
        return 0.5 * (1 - math.cos(math.pi * done))


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
        self._target, self._rate, self._smoothing = target, _positive("rate", rate), smoothing
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


BOUNDS: dict[str, Callable[..., Bound]] = {
    bound.kind: bound for bound in (Fixed, Linear, Cosine, HoldProjectedFraction, HoldKL)
}


def make_bound(name: str, kl_bound: float, *, total_steps: int | None = None, **options: Any) -> Bound:
    """Makes the bound that is registered under a name.

    Args:
        name: A key of :data:`BOUNDS`.
        kl_bound: ε at the start, above 0, in nats.
        total_steps: Optimiser steps of the whole training, where known.
        **options: The keywords of that class: ``end``, ``steps`` for the schedules; ``target``, ``rate``,
            ``smoothing``, ``minimum``, ``maximum`` for the controllers.

    Raises:
        ValueError: On an unknown name, an unknown or missing option, or a value out of its range.
    """
    if name not in BOUNDS:
        raise ValueError(f"bound must be one of {', '.join(BOUNDS)}, got {name!r}")
    if not kl_bound > 0:
        raise ValueError(f"kl_bound must be above 0, got {kl_bound}")
    parameters = inspect.signature(BOUNDS[name]).parameters.values()
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"options of the {name!r} bound must be of: {', '.join(known) or 'none'}; got {', '.join(unknown)}"
        )
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise ValueError(f"the {name!r} bound needs {', '.join(missing)}, got {', '.join(options) or 'no options'}")
    for option, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # YAML reads 1e-3, without a point, as text.
        if not number and not (value is None and known[option].default is None):
            raise ValueError(f"{option} must be a number, got {value!r}")
    return BOUNDS[name](kl_bound, total_steps, **options)


def entropy(policy: SparsePolicy) -> Tensor:
    """Entropy over the K + 1 outcomes, (...), in nats.

    A lower bound of the entropy over the vocabulary: the tail counts as one outcome, and what it hides is its mass
    times the entropy within it, at most ``tail mass · log V``.
    """
    outcomes = policy.outcomes
    return -(outcomes.exp() * outcomes.masked_fill(outcomes == -torch.inf, 0.0)).sum(-1)


def entropy_scaled(
    kl_bound: float | Tensor,
    entropy: Tensor,
    reference_entropy: float | Tensor,
    *,
    exponent: float = 1.0,
    limits: tuple[float, float] = (0.1, 10.0),
) -> Tensor:
    """Per-token bounds ``ε_t = ε · clamp((H_t/H̄)^exponent, limits)``: wider where the old policy is undecided.

    Args:
        kl_bound: ε; a float, or a tensor that broadcasts with the entropies.
        entropy: H_t ≥ 0 of the **old** policy, (...); of the new one, a token could widen its own bound. NaN (a token
            outside the mask) leaves ε as it is.
        reference_entropy: H̄ ≥ 0, a typical H_t, such as the mean over the batch's tokens and processes. A float, or a
            tensor that broadcasts. Where H_t and H̄ are both 0, ε stays as it is.
        exponent: Finite; 0 switches the scaling off, below 0 narrows the bound where the policy is undecided.
        limits: Of the factor, ``0 < lower ≤ upper < inf``.

    Returns:
        (...), as broadcast.

    Raises:
        ValueError: On a value out of its range.
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
    """Per-token bounds: ε where the advantage is not negative, ``negative_kl_bound_ratio · ε`` where it is.

    A ratio below 1 holds on to what was sampled and did badly more tightly than to what did well.

    Args:
        kl_bound: ε; a float, or a tensor that broadcasts with the advantages.
        advantages: Broadcast to the token positions: (B, T), (N,), or (B, 1) for one per sequence.
        negative_kl_bound_ratio: Above 0 and finite.

    Raises:
        ValueError: On a ratio out of its range.
    """
    ratio = _positive("negative_kl_bound_ratio", negative_kl_bound_ratio)
    return kl_bound * torch.ones_like(as_float(advantages)).masked_fill(advantages < 0, ratio)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return value


def _clamped(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])


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
