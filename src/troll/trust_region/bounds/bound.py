"""What every bound is: ε over training, one number at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

State = dict[str, float | int | str]


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
    """ε as training goes on. Make one with `make_bound`.

    A subclass takes ``kl_bound`` and ``total_steps``, and its options as keywords, which `make_bound` checks.
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


def positive(name: str, value: float) -> float:
    """The value; raises ValueError unless it is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return value
