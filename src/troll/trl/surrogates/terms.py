"""The input of a surrogate and its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from troll.trust_region.constraint import Constraint
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import Pull, TrustRegionStep


class ConfigFields(Protocol):
    """The fields of `TrollConfig` that surrogates read in addition to their own settings."""

    pull: Pull
    regression_weight: float


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a micro-batch, each (N,), in both policies.

    Attributes:
        new_log_probs: log p̃(o) of the sampled tokens, raw and differentiable; with `truncated_ratio`, of p̃(o)/p̃(S).
        old_log_probs: log p(o) of the sampled tokens, raw; with `truncated_ratio`, of p(o)/p(S).
        advantages: A of the tokens.
        kl_bound: ε in nats.
        constraint: Groups of tokens that share a multiplier; None if each has its own.
        old: The old policy; None if the surrogate does not need whole distributions.
        new: The new policy on the outcomes that the step needs, differentiable; None if `old` is None.
        sequence: The row of each token's sequence in the micro-batch, int64. A sequence is whole: all its tokens are in
            this micro-batch, next to each other and in order.
        counts: Bool, true for the tokens that count in the loss; false, for example, for the output of a tool. A
            surrogate that compares tokens with each other must leave the others out.
    """

    new_log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    kl_bound: float
    constraint: Constraint | None
    old: SparsePolicy | None
    new: PolicyOnSupport | None
    sequence: Tensor
    counts: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """The raw log ratio log p̃(o)/p(o), (N,), differentiable."""
        return self.new_log_probs - self.old_log_probs

    def by_sequence(self) -> list[Tensor]:
        """The indices (n,) of the tokens that count, in order, for each sequence that has any."""
        at = self.counts.nonzero().squeeze(-1)
        return list(at.split(self.sequence[at].unique_consecutive(return_counts=True)[1].tolist()))


@dataclass(frozen=True)
class Terms:
    """A surrogate's changes to the loss `−exp(log ratio) · A`, each (N,); None means no change.

    Attributes:
        log_ratio: Replaces log p̃(o)/p(o) in the ratio; differentiable.
        keep: Bool, true for the tokens whose policy term counts.
        penalty: Added to the loss of each token, with the policy term's normalisation; differentiable.
        step: The step of the trust region, for the log.
    """

    log_ratio: Tensor | None = None
    keep: Tensor | None = None
    penalty: Tensor | None = None
    step: TrustRegionStep | None = None


@dataclass(frozen=True)
class NoSettings:
    """The settings of a surrogate without settings."""


@dataclass(frozen=True)
class Surrogate:
    """An entry of `SURROGATES`.

    Attributes:
        terms: The surrogate itself, a function of the tokens, the configuration, and the surrogate's own settings; None
            keeps TRL's loss.
        own: The class of the surrogate's own settings, which users set by `surrogate_kwargs`.
        fields: The fields of `TrollConfig` that this surrogate reads and some others do not.
        sets: Fields of TRL's `GRPOConfig`, and the values that they must have with this surrogate.
        clips: Whether TRL's clip stays on.
        projects: Whether there is a projection, to be measured and logged.
        reads_policies: A function of the surrogate's own settings that tells whether it needs whole distributions in
            addition to the sampled tokens' log-probabilities.
    """

    terms: Callable[[ScoredTokens, ConfigFields, Any], Terms] | None = None
    own: type[Any] = NoSettings
    fields: tuple[str, ...] = ()
    sets: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False
    projects: bool = False
    reads_policies: Callable[[Any], bool] = lambda own: False

    @property
    def reads(self) -> tuple[str, ...]:
        """All settings that this surrogate reads and some others do not; its own ones as `surrogate_kwargs.NAME`."""
        return self.fields + tuple(f"surrogate_kwargs.{entry.name}" for entry in dataclasses.fields(self.own))
