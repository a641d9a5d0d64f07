"""Distributions as numbers: precision, the floor, divergence and entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Smaller probabilities are raised to this before a projection, and the distribution renormalised.
PROBABILITY_FLOOR = 1e-12
LOG_FLOOR = math.log(PROBABILITY_FLOOR)


def as_float(tensor: Tensor) -> Tensor:
    """Converts a tensor to float32, unless it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of another dtype are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def floored(log_probs: Tensor, present: Tensor) -> Tensor:
    """Raises probabilities below 1e-12 and renormalises, (..., M); outcomes that are not `present` get −inf.

    No gradient flows through a floored entry.
    """
    raised = log_probs.clamp(min=LOG_FLOOR)
    return torch.log_softmax(raised.masked_fill(~present, -torch.inf), dim=-1)


def divergence(log_ratio: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) in nats from `x = log q − log p`, (..., M) to (...), as `Σ p (x eˣ − expm1 x)`; absent where p = 0.

    No term is negative. The textbook form `Σ q x` cancels in float32 where q is close to p.
    """
    growth = torch.expm1(log_ratio)
    return (torch.exp(log_p) * (log_ratio * (growth + 1) - growth)).sum(-1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """`−Σ p log p` over the last dimension, in nats; outcomes of −inf add nothing."""
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)
