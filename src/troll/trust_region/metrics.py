"""What every step reports: sums that add up over micro-batches and processes, and the metrics made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.trust_region.projecting.step import TrustRegionStep


def trust_region_statistics(step: TrustRegionStep, mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima over the tokens of the mask, 0-d and without gradient.

    Sums add, and maxima combine by maximum, across micro-batches and processes; [trust_region_metrics][] turns
    them into metrics. Tokens whose logits are no distribution are counted as "nonfinite" and left out of the rest.
    """
    mask = mask.bool()
    finite = mask & step.kl_before.isfinite()

    def total(values: Tensor) -> Tensor:
        return torch.where(finite, values.detach(), 0.0).sum()

    def largest(values: Tensor) -> Tensor:
        zero = values.new_zeros(1)
        return torch.cat([torch.where(finite, values, 0.0).flatten(), zero]).max()

    sums = {
        "tokens": finite.sum().to(step.kl_before.dtype),
        "nonfinite": (mask & ~finite).sum().to(step.kl_before.dtype),
        "projected": total(step.projected.to(step.kl_before.dtype)),
        "kl_before": total(step.kl_before),
        "kl_after": total(step.kl_after),
        "multiplier": total(step.multiplier),
        "regression": total(step.regression),
    }
    return sums, {"kl_before": largest(step.kl_before), "kl_after": largest(step.kl_after)}


def trust_region_metrics(sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics over the tokens from [trust_region_statistics][], 0-d.

    Returns:
        ``kl_before_mean``, ``kl_before_max``, ``kl_after_mean``, ``kl_after_max``, ``projected_fraction``,
        ``multiplier`` (η, mean over the projected tokens; 0 if there are none), ``regression`` (mean over all tokens)
        and ``nonfinite`` (a count).
    """
    tokens = sums["tokens"].clamp(min=1)
    return {
        "kl_before_mean": sums["kl_before"] / tokens,
        "kl_before_max": maxima["kl_before"],
        "kl_after_mean": sums["kl_after"] / tokens,
        "kl_after_max": maxima["kl_after"],
        "projected_fraction": sums["projected"] / tokens,
        "multiplier": sums["multiplier"] / sums["projected"].clamp(min=1),
        "regression": sums["regression"] / tokens,
        "nonfinite": sums["nonfinite"],
    }
