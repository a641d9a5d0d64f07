"""What a surrogate is given, what it returns, and what it reads of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from troll.trust_region.policy.outcomes import Outcomes
from troll.trust_region.policy.sparse import SparsePolicy, Tail
from troll.trust_region.projecting.constraint import Constraint
from troll.trust_region.projecting.step import TrustRegionStep


class Settings(Protocol):
    """What surrogates read of a `TrollConfig`."""

    @property
    def regression_weight(self) -> float:
        """α, the weight of the regression term."""

    @property
    def tail(self) -> Tail:
        """What happens to the outcomes outside of the support."""

    @property
    def solver(self) -> str:
        """How the multiplier of a token is found."""

    @property
    def kl_penalty_direction(self) -> str:
        """Which KL divergence is penalised: "old_new" or "new_old"."""

    @property
    def divergence_threshold(self) -> float:
        """δ of the DPPO masks."""

    @property
    def dppo_outcomes(self) -> str:
        """What DPPO measures the divergence on: "binary" or "top_k"."""

    @property
    def drpo_threshold(self) -> float:
        """ε of DRPO."""

    @property
    def ipo_threshold(self) -> float:
        """How far IPO lets the probability of a token move."""

    @property
    def ipo_kl_weight(self) -> float:
        """The weight of the squared log ratio in IPO."""

    @property
    def gmpo_range(self) -> float:
        """How far GMPO lets the log ratio of a token move."""


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a micro-batch, each (N,), in both policies.

    Attributes:
        new_log_probs: log p̃ of the sampled tokens, differentiable.
        old_log_probs: log p of them.
        advantages: Of each token.
        kl_bound: ε; a float or (N,).
        kl_penalty_weight: β now.
        constraint: Which tokens share a multiplier; None if each has its own.
        old: The old policy; None where the surrogate does not read policies.
        new: The new policy, read where the step takes it, differentiable; None as `old`.
    """

    new_log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    kl_bound: float | Tensor
    kl_penalty_weight: float
    constraint: Constraint | None
    old: SparsePolicy | None
    new: Outcomes | None

    @property
    def log_ratio(self) -> Tensor:
        """The raw one, log p̃(o)/p(o), differentiable."""
        return self.new_log_probs - self.old_log_probs


@dataclass(frozen=True)
class Terms:
    """What a surrogate changes in ``−exp(log ratio) · A``, each (N,); None changes nothing.

    Attributes:
        log_ratio: Stands in for log p̃(o)/p(o) in the ratio; differentiable.
        keep: Bool: the tokens whose policy term counts.
        penalty: Added to the loss of each token, with the policy term's normalisation; differentiable.
        penalised_kl: The KL divergence that β weights, without gradient: what an adaptive β goes by.
        step: What the trust region did.
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
        settings: The fields of `TrollConfig` that matter to this surrogate and not to all of them.
        terms: None leaves TRL's loss as it is.
        sets: Fields of TRL's `GRPOConfig` that have to have these values with this surrogate.
        clips: Whether TRL's clip stays on.
        projects: Whether there is a projection within ε, to be measured and logged.
        reads_policies: Whether the distributions are needed in addition to the sampled tokens' log-probabilities.
    """

    settings: tuple[str, ...] = ()
    terms: Callable[[ScoredTokens, Settings], Terms] | None = None
    sets: Mapping[str, str] = field(default_factory=dict)
    clips: bool = False
    projects: bool = False
    reads_policies: Callable[[Settings], bool] = lambda args: False
