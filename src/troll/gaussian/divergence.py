"""The divergence of two Gaussians, as a sum of terms that are never negative, and how far apart their means are.

The textbook form `½ [tr(Σ₀⁻¹Σ) − d − log det(Σ₀⁻¹Σ) + ...]` cancels where two policies are close, as they are in a
trust region. With `X = L₀⁻¹L`, lower triangular,

    KL(N(μ, Σ) ‖ N(μ₀, Σ₀))  =  ½ Σ_{i>j} X_ij²  +  ½ Σ_i e(log X_ii²)  +  ½ ‖L₀⁻¹(μ − μ₀)‖²,     e(y) = eʸ − 1 − y .
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.gaussian.policy import Gaussian, Policy, check_pair, spread_of


def kl(new: Policy, old: Policy) -> Tensor:
    """KL(new ‖ old) at every state, (...), in nats; differentiable in both.

    Args:
        new: A policy with states (...).
        old: A policy of the same kind, dimension and dtype, whose states broadcast with those of `new`.

    Raises:
        ValueError: If the two do not fit.
    """
    mean, covariance = kl_parts(new, old)
    return mean + covariance


def kl_parts(new: Policy, old: Policy) -> tuple[Tensor, Tensor]:
    """The two parts of KL(new ‖ old), in nats: of the means, (...), and of the covariances; differentiable in both.

    Args:
        new: A policy with states (...).
        old: A policy of the same kind, dimension and dtype, whose states broadcast with those of `new`.

    Returns:
        `½ ‖L₀⁻¹(μ − μ₀)‖²` at every state, and `KL(N(0, Σ) ‖ N(0, Σ₀))`, one number for each covariance: without batch
        dimensions if all states share one.

    Raises:
        ValueError: If the two do not fit.
    """
    check_pair(new, old)
    new_spread, old_spread = spread_of(new).double(), spread_of(old).double()
    full = isinstance(new, Gaussian)
    mean = (mahalanobis_full if full else mahalanobis_diagonal)(new.mean.double() - old.mean.double(), old_spread)
    covariance = (covariance_kl_full if full else covariance_kl_diagonal)(new_spread, old_spread)
    return mean.to(new.mean.dtype), covariance.to(new.mean.dtype)


def mahalanobis_full(delta: Tensor, old: Tensor) -> Tensor:
    """`½ ‖L₀⁻¹ δ‖²`, (...), from δ, (..., d), and L₀, (..., d, d)."""
    return 0.5 * whitened(delta, old).square().sum(-1)


def mahalanobis_diagonal(delta: Tensor, old: Tensor) -> Tensor:
    """`½ ‖δ/σ₀‖²`, (...), from δ and σ₀, (..., d)."""
    return 0.5 * (delta / old).square().sum(-1)


def euclidean(delta: Tensor, old: Tensor) -> Tensor:
    """`‖δ‖²`, (...), from δ, (..., d)."""
    return delta.square().sum(-1)


def covariance_kl_full(new: Tensor, old: Tensor) -> Tensor:
    """KL(N(0, LLᵀ) ‖ N(0, L₀L₀ᵀ)), (...), from factors (..., d, d)."""
    growth = torch.linalg.solve_triangular(old, new - old, upper=False)  # X − I
    below = growth.tril(-1).square().sum((-2, -1))
    ratio = new.diagonal(dim1=-2, dim2=-1) / old.diagonal(dim1=-2, dim2=-1)
    return 0.5 * (below + _excess_of_growth(growth.diagonal(dim1=-2, dim2=-1), ratio))


def covariance_kl_diagonal(new: Tensor, old: Tensor) -> Tensor:
    """KL(N(0, diag σ²) ‖ N(0, diag σ₀²)), (...), from standard deviations (..., d)."""
    return 0.5 * _excess_of_growth((new - old) / old, new / old)


def whitened(delta: Tensor, factor: Tensor) -> Tensor:
    """`L⁻¹ δ`, (..., d), from δ, (..., d), and L, (..., d, d)."""
    if factor.dim() == 2:  # one factor for all states: do not repeat it for each
        columns = delta.reshape(-1, delta.shape[-1]).mT
        return torch.linalg.solve_triangular(factor, columns, upper=False).mT.reshape(delta.shape)
    return torch.linalg.solve_triangular(factor, delta.unsqueeze(-1), upper=False).squeeze(-1)


def excess(y: Tensor) -> Tensor:
    """`eʸ − 1 − y` to full precision, even where it is close to `y²/2`."""
    near = y.abs() < 0.1
    small = torch.where(near, y, 0.0)
    one = series = torch.ones_like(y)
    for n in range(11, 2, -1):  # the terms up to y¹¹/11!
        series = torch.addcmul(one, small, series, value=1 / n)
    return torch.where(near, 0.5 * small.square() * series, torch.expm1(y) - y)


def _excess_of_growth(growth: Tensor, ratio: Tensor) -> Tensor:
    """`Σ x² − 1 − log x²` of ratios x, precise where one is near 1, by x − 1, and where it is near 0."""
    near_zero = growth < -0.5
    log_ratio = torch.where(near_zero, ratio, 1.0).log() + torch.where(near_zero, 0.0, growth).log1p()
    return excess(2 * log_ratio).sum(-1)
