"""The metrics of every step, from sums that add up over micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from troll.trust_region.projecting.step import TrustRegionStep
from troll.trust_region.tally import at_once, combined


@dataclass(frozen=True, eq=False)
class Totals:
    """What the trust region did with some tokens, 0-d and without gradient: `first + second` covers both.

    Attributes:
        sums: By the name of the metric that each becomes, the sum over the tokens; and "tokens", their number.
        maxima: By the name of the metric, the largest value.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, step: TrustRegionStep, mask: Tensor) -> Totals:
        """Those of the tokens of the mask, (...); tokens whose logits are no distribution count as "nonfinite" only."""
        mask = mask.bool()
        finite = mask & step.kl_before.isfinite()

        def total(values: Tensor) -> Tensor:
            return torch.where(finite, values.detach(), 0.0).sum()

        def largest(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(torch.where(finite, values, 0.0).flatten(), (0, 1)).max()

        sums = {
            "tokens": finite.sum().to(step.kl_before.dtype),
            "nonfinite": (mask & ~finite).sum().to(step.kl_before.dtype),
            "projected_fraction": total(step.projected.to(step.kl_before.dtype)),
            "kl_before_mean": total(step.kl_before),
            "kl_after_mean": total(step.kl_after),
            "multiplier": total(step.multiplier),
            "regression": total(step.regression),
        }
        return cls(sums, {"kl_before_max": largest(step.kl_before), "kl_after_max": largest(step.kl_after)})

    def __add__(self, other: Totals) -> Totals:
        return Totals(combined(self.sums, other.sums, torch.add), combined(self.maxima, other.maxima, torch.maximum))

    def reduced(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> Totals:
        """Those of all processes, in two collective operations, as `Tally.reduced`."""
        return Totals(at_once(self.sums, total), at_once(self.maxima, largest))

    def metrics(self) -> dict[str, Tensor]:
        """The metrics over the tokens, 0-d.

        Returns:
            `kl_before_mean`, `kl_before_max`, `kl_after_mean`, `kl_after_max`, `projected_fraction`,
            `multiplier` (η, mean over the projected tokens; 0 if there are none), `regression` (mean over all tokens),
            `nonfinite` (a count), and the mean over all tokens of each other sum.
        """
        sums = dict(self.sums)
        tokens, nonfinite = sums.pop("tokens").clamp(min=1), sums.pop("nonfinite")
        multiplier = sums["multiplier"] / sums["projected_fraction"].clamp(min=1)
        means = {name: total / tokens for name, total in sums.items()}
        return means | self.maxima | {"multiplier": multiplier, "nonfinite": nonfinite}
