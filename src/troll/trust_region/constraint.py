"""Groups of tokens that share one multiplier, such as those of a sequence; a group may span processes.

The tokens of a group share one τ, and one bound on the weighted sum of their divergences: docs/method.md derives the
projection and its gradient. Without a constraint every token has its own multiplier.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from .checks import check_choice, check_floating, check_shape
from .dual import Moments, TokenCurve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Scope = Literal["token", "sequence"]
Reduction = Literal["mean", "sum"]
CONSTRAINTS: tuple[Scope, ...] = get_args(Scope)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


@dataclass(frozen=True, eq=False)
class Constraint:
    """Groups of tokens that share one multiplier, and the weights w of their sum: `Σ w KL(q ‖ p) ≤ ε`.

    ε of a group is the mean of its tokens' `kl_bound`, with the same weights. A token of weight 0 is projected with the
    τ of its group, but does not influence it.

    Attributes:
        group: The group of each token position, (...) int64 in [0, groups).
        weight: The weight w ≥ 0 of each token position, (...).
        groups: The number of groups; a group may have no tokens.
        process_group: The processes over which the sums of a group extend; None for this one only. All of them must
            take part in every projection and its backward pass, with the same `groups`, even without tokens.

    Raises:
        ValueError: If group and weight differ in shape, or groups are not int64.
    """

    group: Tensor
    weight: Tensor
    groups: int
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.group.dtype != torch.int64:
            raise ValueError(f"group must be int64, got {self.group.dtype}")
        check_floating("weight", self.weight)
        check_shape("weight", self.weight, self.group.shape)

    @staticmethod
    def sequence(mask: Tensor, reduction: Reduction = "mean") -> Constraint:
        """One multiplier for each row of a (B, T) mask, which is true (or 1) where a token counts.

        With "mean", the bound holds for the mean divergence of the row's tokens; with "sum", for their sum, which in
        expectation is the divergence between the two policies' sequences.

        Raises:
            ValueError: If the mask is not (B, T), or the reduction is unknown.
        """
        check_shape("mask", mask, ("B", "T"))
        counts = mask.bool()
        group = torch.arange(len(mask), device=mask.device).unsqueeze(-1).expand(mask.shape)
        check_choice("reduction", reduction, REDUCTIONS)
        total = counts.sum(-1, keepdim=True).clamp(min=1) if reduction == "mean" else 1
        return Constraint(group, counts.double() / total, len(mask))

    def __getitem__(self, index: Any) -> Constraint:
        """The constraint on some token positions, indexed as a tensor would be; weights do not change."""
        return dataclasses.replace(self, group=self.group[index], weight=self.weight[index])

    def flat(self, shape: torch.Size) -> Constraint:
        """The constraint on the token positions `shape`, flattened.

        Raises:
            ValueError: If the constraint is for other positions, a group is outside [0, groups), or a weight is below 0
                or not finite.
        """
        check_shape("the constraint's token positions", self.group, shape)
        fits = (self.group >= 0) & (self.group < self.groups)
        if not bool(fits.all()):
            raise ValueError(f"constraint: group must be in [0, {self.groups}), got {self.group[~fits][0].item()}")
        fits = (self.weight >= 0) & self.weight.isfinite()
        if not bool(fits.all()):
            raise ValueError(f"constraint: weight must be at least 0 and finite, got {self.weight[~fits][0].item()}")
        return dataclasses.replace(self, group=self.group.reshape(-1), weight=self.weight.reshape(-1))

    def narrowed(self, groups: Tensor) -> tuple[Tensor, Constraint]:
        """Keeps some of the groups of a constraint on (N,) tokens, and renumbers them.

        Args:
            groups: The groups to keep, (G',) int64, ascending.

        Returns:
            The indices of the tokens that stay, (N',), and the constraint on them.
        """
        number = self.group.new_full((self.groups,), -1)
        number[groups] = torch.arange(len(groups), device=groups.device)
        group = number[self.group]
        tokens = (group >= 0).nonzero().squeeze(-1)
        return tokens, dataclasses.replace(self, group=group[tokens], weight=self.weight[tokens], groups=len(groups))

    def total(self, *values: Tensor) -> Tensor:
        """Adds up k quantities of (N,) tokens over each group, and over processes, in float64, (k, groups)."""
        stacked = torch.stack([value.double() for value in values])
        sums = stacked.new_zeros(len(values), self.groups).index_add_(1, self.group, stacked)
        if self.process_group is not None:
            torch.distributed.all_reduce(sums, group=self.process_group)  # every process gets the same numbers
        return sums

    def weighted_total(self, *values: Tensor) -> Tensor:
        """Weighted sums of k quantities of (N,) tokens over each group and over processes, in float64, (k, groups).

        Values of weight 0 do not matter, NaN included.
        """
        counts, weight = self.weight > 0, self.weight.double()
        return self.total(*(torch.where(counts, weight * value, 0.0) for value in values))


class SharedCurve(TokenCurve):
    """The curve `Σ w KL(τ)` over the tokens of each group, for a constraint on (N,) tokens."""

    def __init__(self, log_p: Tensor, s: Tensor, constraint: Constraint) -> None:
        super().__init__(log_p, s)
        self._constraint = constraint

    def at(self, tau: Tensor) -> Moments:
        """The weighted sums at (R,) values of τ."""
        of_tokens = super().at(tau[self._constraint.group])
        return Moments(*self._constraint.weighted_total(*of_tokens).to(tau.dtype))

    def variance_at_zero(self) -> Tensor:
        """`Σ w σ²` at τ = 0, (R,)."""
        variance = super().variance_at_zero()
        return self._constraint.weighted_total(variance)[0].to(variance.dtype)

    def narrow(self, roots: Tensor) -> None:
        """Keeps some of the groups, and their tokens."""
        tokens, self._constraint = self._constraint.narrowed(roots)
        super().narrow(tokens)
