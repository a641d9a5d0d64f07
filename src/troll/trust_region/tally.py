"""Measurements that add up over micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from troll.trust_region.policy.values import as_float, shape_text


@dataclass(frozen=True, eq=False)
class Tally:
    """Named numbers over some tokens, sequences or roots, which add up: `first + second` covers both.

    Attributes:
        totals: For each mean, the sum and the count, (2,).
        maxima: For each maximum, the largest value so far, 0-d; −inf for none.
        minima: For each minimum, the smallest value so far, 0-d; inf for none.
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            combined(self.totals, other.totals, torch.add),
            combined(self.maxima, other.maxima, torch.maximum),
            combined(self.minima, other.minima, torch.minimum),
        )

    def reduced(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> Tally:
        """The tally of all processes, in two collective operations; each must hold the same names in the same order.

        Args:
            total: Adds up a tensor over processes.
            largest: Takes the element-wise maximum of a tensor over processes.

        Returns:
            The tally of all processes, on each of them.
        """
        extremes = at_once(self.maxima | {name: -value for name, value in self.minima.items()}, largest)
        return Tally(
            at_once(self.totals, total),
            {name: extremes[name] for name in self.maxima},
            {name: -extremes[name] for name in self.minima},
        )

    def values(self) -> dict[str, Tensor]:
        """The numbers to log by name, 0-d; NaN where there was nothing to average or compare."""
        means = {name: total[0] / total[1] for name, total in self.totals.items()}
        extremes = self.maxima | self.minima
        return means | {name: value.masked_fill(value.isinf(), torch.nan) for name, value in extremes.items()}


def combined(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], how: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """The numbers of both; `how` makes one of two with the same name."""
    return {**ours, **{name: how(ours[name], value) if name in ours else value for name, value in theirs.items()}}


def at_once(values: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What `change` makes of values of one shape (...), called once, if there are any, with all of them, (n, ...)."""
    return dict(zip(values, change(torch.stack(list(values.values()))), strict=True)) if values else {}


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raises ValueError unless the tensors have the mask's shape."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} must be {shape_text(mask.shape)} like the mask, got {shape_text(tensor.shape)}")


def counted(values: Tensor, mask: Tensor) -> Tensor:
    """The finite values of the mask, (n,)."""
    return as_float(values)[mask.bool() & values.isfinite()]


def mean(values: Tensor) -> Tensor:
    """Sum and count of (n,) values, (2,): a mean that adds up."""
    return torch.stack([values.sum(), values.new_tensor(float(len(values)))])


def largest(values: Tensor) -> Tensor:
    """The largest of (n,) values; −inf if there are none."""
    return values.max() if len(values) else values.new_tensor(-torch.inf)


def quantiles(name: str, values: Tensor, percents: Sequence[int]) -> dict[str, Tensor]:
    """Percentiles of (n,) values, each as a sum and a count that weights it n times in a mean."""
    if len(values) == 0:
        return {f"{name}_p{percent}": values.new_zeros(2) for percent in percents}
    fractions = values.new_tensor([percent / 100 for percent in percents])
    weight = values.new_tensor(float(len(values)))
    return {
        f"{name}_p{percent}": torch.stack([quantile * weight, weight])
        for percent, quantile in zip(percents, torch.quantile(values, fractions), strict=True)
    }


def distribution(name: str, values: Tensor, percents: Sequence[int]) -> dict[str, Tensor]:
    """The mean and percentiles of (n,) values."""
    return {name: mean(values)} | quantiles(name, values, percents)
