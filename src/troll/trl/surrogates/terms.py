"""The input of a surrogate and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.pull import Pull
from troll.trust_region.projecting.step import TrustRegionStep

DppoOutcomes = Literal["binary", "top_k"]
KlDirection = Literal["old_new", "new_old"]


class Settings(Protocol):
    """The fields of `TrollConfig` that the surrogates read."""

    tail: Tail
    solver: str
    pull: Pull
    kl_penalty_direction: KlDirection
    kl_penalty_clip: float | None
    kl_penalty_cap: float | None
    dppo_outcomes: DppoOutcomes
    drpo_threshold: float
    ipo_threshold: float
    ipo_kl_weight: float
    gmpo_range: float

    @property
    def divergence_threshold(self) -> float:
        """δ of the DPPO mask."""


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a micro-batch, each (N,), in both policies.

    Attributes:
        new_log_probs: log p̃(o) of the sampled tokens, raw and differentiable.
        old_log_probs: log p(o) of the sampled tokens, raw.
        advantages: The tokens' advantages.
        kl_bound: ε in nats, a float or (N,).
        penalty_weight: The weight of the surrogate's divergence for this update: α of a pull, β of a KL penalty.
        constraint: Which tokens share a multiplier; None if each has its own.
        old: The old policy; None where the surrogate does not read policies.
        new: The new policy on the outcomes that the step needs, differentiable; None where `old` is.
    """

    new_log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    kl_bound: float | Tensor
    penalty_weight: float
    constraint: Constraint | None
    old: SparsePolicy | None
    new: Outcomes | None

    @property
    def log_ratio(self) -> Tensor:
        """The raw log ratio log p̃(o)/p(o), (N,), differentiable."""
        return self.new_log_probs - self.old_log_probs


@dataclass(frozen=True)
class Terms:
    """The changes of a surrogate to the loss `−exp(log ratio) · A`, each (N,); None changes nothing.

    Attributes:
        log_ratio: Replaces log p̃(o)/p(o) in the ratio; differentiable.
        keep: Bool, true for the tokens whose policy term counts.
        penalty: Added to the loss of each token, with the policy term's normalisation; differentiable.
        penalised_kl: The KL divergence that the penalty weights, in nats, without gradient; an adaptive weight follows
            it.
        step: What the trust region did, for the log.
    """

    log_ratio: Tensor | None = None
    keep: Tensor | None = None
    penalty: Tensor | None = None
    penalised_kl: Tensor | None = None
    step: TrustRegionStep | None = None


@dataclass(frozen=True)
class Surrogate:
    """An entry of `SURROGATES`.

    Attributes:
        settings: The fields of `TrollConfig` that this surrogate reads and some others do not.
        terms: The surrogate itself; None leaves TRL's loss as it is.
        sets: Fields of TRL's `GRPOConfig`, and the values that they must have with this surrogate.
        penalty: The beginning of the settings `*_weight` and `*_target` of its divergence; None if it weights none.
        clips: Whether TRL's clip stays on.
        projects: Whether there is a projection within ε, to be measured and logged.
        reads_policies: Whether it needs distributions in addition to the sampled tokens' log-probabilities.
    """

    settings: tuple[str, ...] = ()
    terms: Callable[[ScoredTokens, Settings], Terms] | None = None
    sets: Mapping[str, str] = field(default_factory=dict)
    penalty: str | None = None
    clips: bool = False
    projects: bool = False
    reads_policies: Callable[[Settings], bool] = lambda args: False
