r"""The projection in the Wasserstein-2 distance: along the geodesic, exact even where the covariances do not commute.

Let O be the orthogonal matrix for which `L₀ᵀ L O` is symmetric and positive, and `C = L O`. Then

    W₂²(N(μ, Σ), N(μ₀, Σ₀)) = ‖μ − μ₀‖² + ‖C − L₀‖_F² ,

and `L₀ + t(C − L₀)`, t from 0 to 1, is a root of the covariances on the geodesic from Σ₀ to Σ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.gaussian.divergence import euclidean
from troll.gaussian.policy import DiagonalGaussian, Gaussian, Policy
from troll.gaussian.projection import GaussianProjection, Geometry, along_line, separately
from troll.gaussian.triangular import covariance_gradient, inner, lower_root


def project_wasserstein(
    new: Policy, old: Policy, mean_bound: float | Tensor, covariance_bound: float | Tensor
) -> GaussianProjection[Policy]:
    r"""Projects means and covariances onto Wasserstein-2 balls around the old policy's.

        ‖μ_q − μ₀‖² ≤ ε_μ,     W₂²(Σ_q, Σ₀) = tr(Σ_q + Σ₀ − 2 (Σ₀^½ Σ_q Σ₀^½)^½) ≤ ε_Σ .

    A mean or covariance outside its ball moves along the geodesic towards the old one, to √(ε / W₂²) times its
    distance. By the triangle inequality no point of the ball is nearer to the new policy, so this is exact; covariances
    need not commute. Gradients reach the new policy only. Everything is computed in float64.

    Args:
        new: The policy to project; means (..., d), covariances one for each state or shared.
        old: A policy of the same kind, dimension and dtype, whose states broadcast with those of `new`.
        mean_bound: ε_μ > 0 in squared units of the actions, a float or a tensor that broadcasts to the states;
            infinity never projects.
        covariance_bound: ε_Σ > 0 in squared units of the actions, likewise, for each covariance.

    Returns:
        The projection. A covariance that the states of both policies share stays one covariance.

    Raises:
        ValueError: If the policies do not fit, or a bound is not above 0 or does not broadcast.
    """
    return separately(new, old, mean_bound, covariance_bound, GEOMETRIES[type(new)])


def _full_distance(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The squared distance; and O, (N, d, d), with the eigenvectors and eigenvalues of `L₀ᵀ L O`."""
    vectors, values, right = torch.linalg.svd(old.mT @ new)
    rotation = right.mT @ vectors.mT
    return (new @ rotation - old).square().sum((-2, -1)), rotation, vectors, values


def _diagonal_distance(new: Tensor, old: Tensor) -> tuple[Tensor]:
    return ((new - old).square().sum(-1),)


def _diagonal_onto_ball(new: Tensor, old: Tensor, bound: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return along_line(new, old, *_diagonal_distance(new, old), bound)


class _FullOntoBall(torch.autograd.Function):
    """Factors (N, d, d) outside their balls, projected, and τ, (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        new: Tensor,
        old: Tensor,
        bound: Tensor,
        distance: Tensor,
        rotation: Tensor,
        vectors: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        way = new @ rotation - old
        tau = torch.sqrt(bound / distance)
        factor, turn = lower_root(old + tau[:, None, None] * way)
        ctx.save_for_backward(old, way, rotation, vectors, values, factor, turn, distance, tau)
        ctx.mark_non_differentiable(tau)
        return factor, tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        old, way, rotation, vectors, values, factor, turn, distance, tau = ctx.saved_tensors
        # With respect to the root F = L₀ + τ(C − L₀) of the projected covariance, whose factor is F · turn.
        root = torch.linalg.solve_triangular(factor.mT, 2 * covariance_gradient(factor, grad), upper=True) @ turn.mT
        # The bound removes the part along the geodesic.
        aligned = tau[:, None, None] * (root - (inner(root, way) / distance)[:, None, None] * way)
        # C = L O also turns with L, by a skew matrix Ω that keeps K = L₀ᵀC symmetric: KΩ + ΩK = Eᵀ − E, E = L₀ᵀ dL O.
        # Only the part tangential to the ball turns: `way` itself is minimal over all O.
        skew = (old + way).mT @ (tau[:, None, None] * root)
        skew = 0.5 * (vectors.mT @ (skew - skew.mT) @ vectors) / (values.unsqueeze(-1) + values.unsqueeze(-2))
        turning = old @ (vectors @ skew @ vectors.mT)
        return ((aligned - 2 * turning) @ rotation.mT).tril(), *(None,) * 6


GEOMETRIES: dict[type, Geometry] = {
    Gaussian: Geometry(euclidean, _full_distance, _FullOntoBall.apply),
    DiagonalGaussian: Geometry(euclidean, _diagonal_distance, _diagonal_onto_ball),
}
