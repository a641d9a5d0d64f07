"""Lower-triangular factors: computing one, and converting a gradient with respect to one to that of the covariance."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_root(precision: Tensor) -> Tensor:
    """R, lower triangular, with `R Rᵀ = M⁻¹`, from a symmetric positive M, (..., d, d), without inverting M."""
    # M = U Uᵀ with U upper triangular is the Cholesky decomposition in the reverse order of rows and columns.
    upper = torch.linalg.cholesky(precision.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device).expand_as(precision)
    return torch.linalg.solve_triangular(upper, identity, upper=True).mT


def lower_root(root: Tensor) -> tuple[Tensor, Tensor]:
    """L, lower triangular, with `L Lᵀ = F Fᵀ`, from any F, (..., d, k ≥ d); and orthonormal columns Θ with `L = F Θ`.

    The product `F Fᵀ` is never formed: its Cholesky decomposition would lose half of the digits.
    """
    rotation, upper = torch.linalg.qr(root.mT)
    sign = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(root.dtype)
    return (upper * sign.unsqueeze(-1)).mT, rotation * sign.unsqueeze(-2)


def covariance_gradient(factor: Tensor, grad: Tensor) -> Tensor:
    """`Q = Lᵀ (∂ℓ/∂Σ) L`, symmetric, from L and `∂ℓ/∂L`, (..., d, d), where `Σ = L Lᵀ`.

    It is the adjoint of the Cholesky decomposition without its two inverses, which cancel in most uses.
    """
    below = (factor.mT @ grad).tril()
    return 0.5 * (below + below.tril(-1).mT)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """`tr(aᵀ b)`, (...), of matrices (..., d, d)."""
    return (a * b).sum((-2, -1))
