"""The Frobenius projection: straight lines between means, and between covariances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.gaussian.divergence import euclidean
from troll.gaussian.policy import DiagonalGaussian, Gaussian, Policy
from troll.gaussian.projection import GaussianProjection, Geometry, along_line, separately
from troll.gaussian.triangular import covariance_gradient, inner, lower_root


def project_frobenius(
    new: Policy, old: Policy, mean_bound: float | Tensor, covariance_bound: float | Tensor
) -> GaussianProjection[Policy]:
    r"""Projects means and covariances onto Euclidean and Frobenius balls around the old policy's.

        ‖μ_q − μ₀‖² ≤ ε_μ,     ‖Σ_q − Σ₀‖_F² ≤ ε_Σ .

    A mean or covariance outside its ball moves along the straight line towards the old one, to τ times its distance
    with `τ = √(ε / squared distance)`, which is exact: `Σ_q = (1−τ)Σ₀ + τΣ`. Gradients reach the new policy only.
    Everything is computed in float64.

    Args:
        new: The policy to project; means (..., d), covariances one for each state or shared.
        old: A policy of the same kind, dimension and dtype, whose states broadcast with those of `new`.
        mean_bound: ε_μ > 0 in squared units of the actions, a float or a tensor that broadcasts to the states;
            infinity never projects.
        covariance_bound: ε_Σ > 0 in the fourth power of the units of the actions, likewise, for each covariance.

    Returns:
        The projection. A covariance that the states of both policies share stays one covariance.

    Raises:
        ValueError: If the policies do not fit, or a bound is not above 0 or does not broadcast.
    """
    return separately(new, old, mean_bound, covariance_bound, GEOMETRIES[type(new)])


def _difference(new: Tensor, old: Tensor) -> Tensor:
    """`LLᵀ − L₀L₀ᵀ`, (..., d, d), to full precision where the factors are close."""
    delta = new - old
    return delta @ new.mT + old @ delta.mT


def _full_distance(new: Tensor, old: Tensor) -> tuple[Tensor]:
    return (_difference(new, old).square().sum((-2, -1)),)


def _diagonal_distance(new: Tensor, old: Tensor) -> tuple[Tensor]:
    return (((new - old) * (new + old)).square().sum(-1),)


def _diagonal_onto_ball(new: Tensor, old: Tensor, bound: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    variance, tau = along_line(new.square(), old.square(), *_diagonal_distance(new, old), bound)
    return variance.sqrt(), tau


class _FullOntoBall(torch.autograd.Function):
    """Factors (N, d, d) outside their balls, projected, and τ, (N,)."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, old: Tensor, bound: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        tau = torch.sqrt(bound / distance)
        weight = tau[:, None, None]
        factor, _ = lower_root(torch.cat([(1 - weight).sqrt() * old, weight.sqrt() * new], -1))
        ctx.save_for_backward(new, old, factor, distance, tau)
        ctx.mark_non_differentiable(tau)
        return factor, tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        new, old, factor, distance, tau = ctx.saved_tensors
        upper = factor.mT
        covariance = covariance_gradient(factor, grad)
        covariance = torch.linalg.solve_triangular(upper, covariance, upper=True)
        covariance = torch.linalg.solve_triangular(factor, covariance, upper=False, left=False)
        difference = _difference(new, old)
        # Σ moves on the surface of the ball only, so its gradient has no part along the line.
        radial = (inner(covariance, difference) / distance)[:, None, None]
        covariance = tau[:, None, None] * (covariance - radial * difference)
        return 2 * (covariance @ new).tril(), None, None, None


GEOMETRIES: dict[type, Geometry] = {
    Gaussian: Geometry(euclidean, _full_distance, _FullOntoBall.apply),
    DiagonalGaussian: Geometry(euclidean, _diagonal_distance, _diagonal_onto_ball),
}
