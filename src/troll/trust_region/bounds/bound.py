"""The interface of all bounds: ε over training, one number at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class BoundStatistics:
    """What the trust region did in one optimiser step, over the tokens of all its micro-batches and processes.

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
    """ε over training, one number at a time. [make_bound][troll.make_bound] makes one.

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
            statistics: What the trust region did in it.
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


def positive(name: str, value: float) -> float:
    """The value; raises ValueError unless it is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return value
