"""Numbers of distributions: precision, floors, divergences; and how arguments are checked and named in errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Smaller probabilities are raised to this before a projection, and the distribution renormalised.
PROBABILITY_FLOOR = 1e-12
LOG_FLOOR = math.log(PROBABILITY_FLOOR)


def as_float(tensor: Tensor) -> Tensor:
    """Float64 stays what it is; everything else is computed in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype numbers of another are computed: see [as_float][]."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_count(count: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of integers in a given dtype; torch would give it in float32."""
    return count.to(dtype).log()


def floored(log_probs: Tensor, present: Tensor) -> Tensor:
    """Raises probabilities below 1e-12 and renormalises, (..., M); outcomes that are not `present` get −inf.

    No gradient flows through a floored entry.
    """
    raised = log_probs.clamp(min=LOG_FLOOR)
    return torch.log_softmax(raised.masked_fill(~present, -torch.inf), dim=-1)


def divergence(log_ratio: Tensor, log_p: Tensor) -> Tensor:
    """KL(q ‖ p) from ``x = log q − log p``, (..., M) to (...), as ``Σ p (x eˣ − expm1 x)``; absent where p = 0.

    No term is negative. The textbook form ``Σ q x`` cancels in float32 where q is close to p.
    """
    growth = torch.expm1(log_ratio)
    return (torch.exp(log_p) * (log_ratio * (growth + 1) - growth)).sum(-1)


def entropy_of(log_probs: Tensor) -> Tensor:
    """``−Σ p log p`` over the last dimension, in nats; outcomes of −inf count nothing."""
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)


def check_integers(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor is of integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[object]) -> None:
    """Raises ValueError unless a tensor has this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must be {shape_text(shape)}, got {shape_text(tensor.shape)}")


def shape_text(shape: Sequence[object]) -> str:
    """A shape as error messages show it."""
    return f"({', '.join(map(str, shape))})"
