"""The input of a surrogate, its output, and its entry in the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from troll.trust_region.checks import check_shape
from troll.trust_region.constraint import Constraint
from troll.trust_region.policy.on_support import PolicyOnSupport
from troll.trust_region.policy.sparse import SparsePolicy
from troll.trust_region.step import TrustRegionStep


@dataclass(frozen=True)
class ScoredTokens:
    """The N scored tokens of a micro-batch in both policies: p, the old one, and p̃, the new one.

    Log-probabilities are in nats.

    Attributes:
        new_log_probs: (N,), log p̃(o) of the sampled tokens, raw and differentiable; with `truncated_ratio`, of
            p̃(o)/p̃(S).
        old_log_probs: (N,), log p(o) of the sampled tokens, raw; with `truncated_ratio`, of p(o)/p(S).
        advantages: (N,), A of the tokens.
        kl_bound: ε in nats.
        constraint: Groups of tokens that share a multiplier; None if each has its own.
        old: (N,) distributions, the old policy; None if the surrogate does not need whole distributions.
        new: (N,) distributions, the new policy on the outcomes of `old`, differentiable; None if `old` is None.
        sequence: (N,) int64, the row of each token's sequence in the micro-batch. A sequence is whole: all its tokens
            are in this micro-batch, next to each other and in order.
        counts: (N,) bool, true for the tokens that count in the loss; false, for example, for the output of a tool. A
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
    """A surrogate's changes to the loss `−exp(log ratio) · A` of each token, each (N,); None means no change.

    Attributes:
        log_ratio: Replaces log p̃(o)/p(o) in the ratio; differentiable.
        keep: Bool, true for the tokens whose policy term counts. A dropped token still counts in the normalisation of
            the loss.
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
    """A surrogate, as [register_surrogate][troll.trl.register_surrogate] takes it.

    Attributes:
        terms: The surrogate itself, a function of the tokens, the `TrollConfig`, and the surrogate's own settings; None
            keeps TRL's loss.
        own: A frozen dataclass with the surrogate's own settings, which users set by `surrogate_kwargs`. Every field
            has a default, and is a `bool`, a `Literal` of words, or a [number][troll.trl.surrogates.number].
        fields: The fields of `TrollConfig` that this surrogate reads and some others do not. `troll compare` gives a
            surrogate no extra runs for the others' fields.
        sets: Fields of TRL's `GRPOConfig`, and the values that they must have with this surrogate.
        clips: Whether TRL's clip stays on.
        projects: Whether there is a projection, to be measured and logged: `terms` then returns its `step`.
        reads_policies: Whether it needs whole distributions, `ScoredTokens.old` and `.new`, in addition to the sampled
            tokens' log-probabilities; or a function of the surrogate's own settings that tells whether.
    """

    terms: Callable[[ScoredTokens, Any, Any], Terms] | None = None
    own: type[Any] = NoSettings
    fields: tuple[str, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    clips: bool = False
    projects: bool = False
    reads_policies: bool | Callable[[Any], bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        """All settings that this surrogate reads and some others do not; its own ones as `surrogate_kwargs.NAME`."""
        return self.fields + tuple(f"surrogate_kwargs.{entry.name}" for entry in dataclasses.fields(self.own))

    def needs_policies(self, own: Any) -> bool:
        """Whether it needs whole distributions with these settings of its own."""
        return self.reads_policies(own) if callable(self.reads_policies) else self.reads_policies

    def apply(self, tokens: ScoredTokens, args: Any, own: Any) -> Terms:
        """The terms of a micro-batch, checked; without a function there are none, and the loss is TRL's.

        Args:
            tokens: The tokens.
            args: The `TrollConfig`.
            own: The surrogate's own settings.

        Raises:
            ValueError: If the function does not return `Terms`, or in them tensors of another shape or type, or a ratio
                without a gradient, which would teach the network nothing.
        """
        if self.terms is None:
            return Terms()
        terms = self.terms(tokens, args, own)
        if not isinstance(terms, Terms):
            raise ValueError(f"a surrogate must return Terms, got {type(terms).__name__}")
        for name in ("log_ratio", "keep", "penalty"):
            if (value := getattr(terms, name)) is not None:
                check_shape(f"{name} of a surrogate", value, tokens.advantages.shape)
        if terms.keep is not None and terms.keep.dtype != torch.bool:
            raise ValueError(f"keep of a surrogate must be bool, got {terms.keep.dtype}")
        learns = tokens.new_log_probs.requires_grad
        if terms.log_ratio is not None and learns and not terms.log_ratio.requires_grad:
            raise ValueError("log_ratio of a surrogate must have a gradient: do not detach it")
        return terms
