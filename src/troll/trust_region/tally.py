"""Numbers that add up: what one micro-batch and one process measured, with what others did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from troll.trust_region.policy.values import as_float, shape_text


@dataclass(frozen=True)
class Tally:
    """Named numbers over some tokens, sequences or roots, which add up: ``first + second`` covers both.

    Attributes:
        totals: Of what is averaged: the sum and the count, (2,).
        maxima: Of what a maximum is taken, 0-d; −inf for none.
        minima: Of what a minimum is taken, 0-d; inf for none.
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        def combined(
            ours: dict[str, Tensor], theirs: dict[str, Tensor], how: Callable[[Tensor, Tensor], Tensor]
        ) -> dict[str, Tensor]:
            return ours | {name: how(ours[name], value) if name in ours else value for name, value in theirs.items()}

        return Tally(
            combined(self.totals, other.totals, torch.add),
            combined(self.maxima, other.maxima, torch.maximum),
            combined(self.minima, other.minima, torch.minimum),
        )

    def reduced(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> Tally:
        """Over all processes, each of which holds the same names in the same order: two collective operations.

        Args:
            total: Adds up a vector over processes.
            largest: Its element-wise maximum over processes.
        """
        totals, extremes = self.totals, [*self.maxima.values(), *(-value for value in self.minima.values())]
        if totals:
            totals = dict(zip(totals, total(torch.cat(list(totals.values()))).view(-1, 2), strict=True))
        if extremes:
            extremes = list(largest(torch.stack(extremes)))
        maxima, minima = extremes[: len(self.maxima)], extremes[len(self.maxima) :]
        return Tally(
            totals,
            dict(zip(self.maxima, maxima, strict=True)),
            dict(zip(self.minima, (-value for value in minima), strict=True)),
        )

    def values(self) -> dict[str, Tensor]:
        """The numbers to log, 0-d; NaN where there was nothing to average or compare."""
        means = {name: total[0] / total[1] for name, total in self.totals.items()}
        extremes = self.maxima | self.minima
        return means | {name: value.masked_fill(value.isinf(), torch.nan) for name, value in extremes.items()}


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raises ValueError unless the tensors have the mask's shape."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} must be {shape_text(mask.shape)} like the mask, got {shape_text(tensor.shape)}")


def counted(values: Tensor, mask: Tensor) -> Tensor:
    """The finite values of the mask, (n,)."""
    return as_float(values)[mask.bool() & values.isfinite()]


def mean(values: Tensor) -> Tensor:
    """Sum and count of (n,) values: a mean that adds up."""
    return torch.stack([values.sum(), values.new_tensor(float(len(values)))])


def largest(values: Tensor) -> Tensor:
    """Of (n,) values; −inf of none."""
    return values.max() if len(values) else values.new_tensor(-torch.inf)


def quantiles(name: str, values: Tensor, percents: Sequence[int]) -> dict[str, Tensor]:
    """Percentiles of (n,) values; in a mean they count n times."""
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
