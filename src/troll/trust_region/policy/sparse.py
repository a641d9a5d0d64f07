"""The sparse policy: the few outcomes of a token's distribution that carry its mass, and a tail for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import shape_text


def leave_inference_mode(policy: Any) -> None:
    """Copies the tensors of a new policy that were made in inference mode, which no backward pass may use."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            for name, value in list(vars(policy).items()):
                if isinstance(value, Tensor) and value.is_inference():
                    object.__setattr__(policy, name, value.clone())  # the policies are frozen


@dataclass(frozen=True, eq=False)
class SparsePolicy:
    """Next-token distributions on at most K tokens each, and the mass of all other tokens; raw, and without gradient.

    Make one with [capture][troll.capture] or [capture_top][troll.capture_top]. Used slots come first: larger
    probability before smaller, then smaller id before larger.

    Attributes:
        token_ids: (..., K) int64; −1 in unused slots.
        log_probs: (..., K) float32 (float64 for float64 logits), in nats; −inf in unused slots.
        tail_log_prob: (...), log of the mass outside the slots; −inf where nothing is outside. Of a truncated policy,
            log of the mass that the sampler cut from the whole policy, or −inf if this mass is unknown.
        slot: (...) int64, the slot of the sampled token.
        vocab_size: V of the captured source.
        mass_threshold: δ of the capture.
        truncated: Whether the slots are a sampler's kept set, outside of which nothing is compared.
        temperature: The sampling temperature of the source that was captured; None if it is not known. A step at
            another one is refused.
    """

    token_ids: Tensor
    log_probs: Tensor
    tail_log_prob: Tensor
    slot: Tensor
    vocab_size: int
    mass_threshold: float
    truncated: bool = False
    temperature: float | None = None

    def __post_init__(self) -> None:
        leave_inference_mode(self)

    @property
    def shape(self) -> torch.Size:
        """The token positions, (...)."""
        return self.tail_log_prob.shape

    @property
    def top_k(self) -> int:
        """K, the number of slots of each position, used or not."""
        return self.token_ids.shape[-1]

    @property
    def log_prob(self) -> Tensor:
        """Log-probability of the sampled token, (...), in nats."""
        return self.log_probs.gather(-1, self.slot.unsqueeze(-1)).squeeze(-1)

    @property
    def used(self) -> Tensor:
        """(..., K) bool, true in slots that hold a token."""
        return self.token_ids >= 0

    @property
    def outcomes(self) -> Tensor:
        """Log-probabilities of all K + 1 outcomes, the tail last, (..., K + 1); −inf for what a sampler cut."""
        return torch.cat([self.log_probs, self.tail.unsqueeze(-1)], dim=-1)

    @property
    def tail(self) -> Tensor:
        """The tail's log-probability as an outcome, (...), in nats: a truncated policy has none."""
        return torch.full_like(self.tail_log_prob, -torch.inf) if self.truncated else self.tail_log_prob

    def view(self, shape: Sequence[int]) -> SparsePolicy:
        """The same positions in another shape."""
        return self.each(lambda x: x.reshape((*shape, *x.shape[len(self.shape) :])))

    def to(self, *args: Any, **kwargs: Any) -> SparsePolicy:
        """Moves devices and casts the log-probabilities, with the arguments of `torch.Tensor.to`."""
        log_probs = self.log_probs.to(*args, **kwargs)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.to(log_probs.device),
            log_probs=log_probs,
            tail_log_prob=self.tail_log_prob.to(*args, **kwargs),
            slot=self.slot.to(log_probs.device),
        )

    def __getitem__(self, index: Any) -> SparsePolicy:
        """Indexes the token positions, as a tensor of shape (...) would be."""
        rows = torch.arange(self.shape.numel(), device=self.slot.device).view(self.shape)[index]
        return self.each(lambda x: x.reshape(-1, *x.shape[len(self.shape) :])[rows])

    def check_positions(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless the policy holds these token positions."""
        if tuple(self.shape) != tuple(shape):
            raise ValueError(f"old must hold the positions {shape_text(shape)}, got {shape_text(self.shape)}")

    def check_temperature(self, temperature: float | None) -> None:
        """Raises ValueError if a step's temperature is not that of the capture; None is not compared."""
        if None not in (temperature, self.temperature) and temperature != self.temperature:
            raise ValueError(
                f"temperature must be that of the old policy's capture, {self.temperature}, got {temperature}: at "
                "another one the policies differ before any update"
            )

    def with_positions(self, index: Tensor, other: SparsePolicy) -> SparsePolicy:
        """Replaces the policies at the positions `index`, (n,), of (N,) by those of another capture, (n,)."""
        slots = max(self.top_k, other.top_k)
        ours, theirs = vars(self.widened(slots)), vars(other.widened(slots))
        replaced: dict[str, Any] = {
            name: x.index_copy(0, index, theirs[name]) for name, x in ours.items() if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **replaced)

    def widened(self, slots: int) -> SparsePolicy:
        """The same policies with more slots, the further ones unused."""
        if slots == self.top_k:
            return self
        unused = (0, slots - self.top_k)
        token_ids = torch.nn.functional.pad(self.token_ids, unused, value=-1)
        log_probs = torch.nn.functional.pad(self.log_probs, unused, value=-torch.inf)
        return dataclasses.replace(self, token_ids=token_ids, log_probs=log_probs)

    def each(self, change: Callable[[Tensor], Any]) -> SparsePolicy:
        """Applies `change` to every tensor; the dimensions after the token positions are slots."""
        return dataclasses.replace(
            self, **{name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        )


def check_capture(top_k: int, mass_threshold: float) -> None:
    """Raises ValueError if a parameter of a capture is out of its range."""
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k}")
    if not 0 <= mass_threshold < 1:
        raise ValueError(f"mass_threshold must be in [0, 1), got {mass_threshold}")
