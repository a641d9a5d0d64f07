"""Measurements that add up over micro-batches and processes, and the metrics of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .policy.sparse import SparsePolicy
from .step import TrustRegionStep


@dataclass(frozen=True, eq=False)
class Tally:
    """Named numbers over some tokens, sequences or roots, which add up: `first + second` covers both.

    Attributes:
        totals: For each mean, the sum and the count, (2,).
        maxima: For each maximum, the largest value so far, 0-d; −inf for none.
        minima: For each minimum, the smallest value so far, 0-d; inf for none.
        counts: For each number of something, the number so far, 0-d.
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            _combined(self.totals, other.totals, torch.add),
            _combined(self.maxima, other.maxima, torch.maximum),
            _combined(self.minima, other.minima, torch.minimum),
            _combined(self.counts, other.counts, torch.add),
        )

    def reduced(self, sum_all: Callable[[Tensor], Tensor], max_all: Callable[[Tensor], Tensor]) -> Tally:
        """The tally of all processes, in two collective operations; each must hold the same names in the same order.

        Args:
            sum_all: Adds up a tensor over processes.
            max_all: Takes the element-wise maximum of a tensor over processes.
        """
        sums = _at_once(self.totals | self.counts, sum_all)
        extremes = _at_once(self.maxima | {name: -value for name, value in self.minima.items()}, max_all)
        return Tally(
            {name: sums[name] for name in self.totals},
            {name: extremes[name] for name in self.maxima},
            {name: -extremes[name] for name in self.minima},
            {name: sums[name] for name in self.counts},
        )

    def values(self, empty: float = math.nan) -> dict[str, Tensor]:
        """The numbers to log by name, 0-d; `empty` where there was nothing to average or compare."""
        means = {name: torch.where(total[1] > 0, total[0] / total[1], empty) for name, total in self.totals.items()}
        largest = {name: value.masked_fill(value == -torch.inf, empty) for name, value in self.maxima.items()}
        smallest = {name: value.masked_fill(value == torch.inf, empty) for name, value in self.minima.items()}
        return means | self.counts | largest | smallest


def step_tally(step: TrustRegionStep, mask: Tensor) -> Tally:
    """The metrics of a step over the tokens (...) of a mask; `values(empty=0.0)` returns the numbers to log.

    Returns:
        The means `projected_fraction`, `kl_before_mean`, `kl_after_mean` and `regression` over the tokens; `multiplier`
        (η, the mean over the projected tokens); where old policies are truncated, `kept_mass`, the mean of the new
        policy's mass on the kept set; the maxima `kl_before_max` and `kl_after_max`; and `nonfinite`, the
        number of tokens whose logits are not a distribution. The other metrics leave these out, and also the rest of
        their group where tokens share a multiplier, since the group has no projection.
    """
    # Stacked, since on a GPU each operation on so few numbers takes as long as its launch.
    averaged = {
        "kl_before_mean": step.kl_before,
        "kl_after_mean": step.kl_after,
        "projected_fraction": step.projected,
        "multiplier": step.multiplier,
        "regression": step.regression,
    }
    if step.kept_log_mass is not None:
        averaged["kept_mass"] = step.kept_log_mass.exp()
    values = _stacked(averaged.values(), step.kl_before.dtype)
    divergences, counts = values[:2], mask.bool().reshape(-1)
    distribution, has_projection = divergences.isfinite().unbind()
    finite = counts & distribution & has_projection
    masks = torch.stack([finite & values[2].bool() if name == "multiplier" else finite for name in averaged])
    outside = torch.where(finite, divergences, -torch.inf)
    largest = outside.amax(-1) if outside.shape[-1] else outside.new_full((2,), -torch.inf)
    return Tally(
        dict(zip(averaged, _masked_totals(values, masks), strict=True)),
        dict(zip(("kl_before_max", "kl_after_max"), largest, strict=True)),
        counts={"nonfinite": (counts & ~distribution).sum().to(values.dtype)},
    )


def support_tally(old: SparsePolicy, mask: Tensor) -> Tally:
    """The means over a mask's tokens (...) of `support_size`, the used slots, and of `tail_mass`, the mass outside.

    Tokens whose old policy is not a distribution have no tail mass.
    """
    averaged = {"support_size": old.used.sum(-1), "tail_mass": old.tail_log_prob.exp()}
    values = _stacked(averaged.values(), old.log_probs.dtype)
    masks = mask.bool().reshape(-1) & ~values.isnan()
    return Tally(dict(zip(averaged, _masked_totals(values, masks), strict=True)))


def masked_total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of values (...) over a mask's tokens, and their number, (2,), without gradient or a wait for the device.

    Values outside the mask do not matter, NaN included.
    """
    return _masked_totals(values.detach().reshape(1, -1), mask.bool().reshape(1, -1))[0]


def _masked_totals(values: Tensor, masks: Tensor) -> Tensor:
    """The sums of m quantities of N tokens, (m, N), each over its mask, and the numbers of tokens, (m, 2)."""
    return torch.stack([torch.where(masks, values, 0.0).sum(-1), masks.sum(-1).to(values.dtype)], dim=-1)


def _stacked(values: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Quantities of (...) tokens as (m, N), without gradient."""
    return torch.stack([x.detach().reshape(-1).to(dtype) for x in values])


def _combined(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], how: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """The numbers of both; `how` combines two of the same name."""
    return {**ours, **{name: how(ours[name], value) if name in ours else value for name, value in theirs.items()}}


def _at_once(values: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Applies `change` once to all elements of the values, as one vector; not at all if there are none."""
    if not values:
        return {}
    sizes = [value.numel() for value in values.values()]
    changed = change(torch.cat([value.reshape(-1) for value in values.values()])).split(sizes)
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), changed, strict=True)}
