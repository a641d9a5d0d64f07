r"""The KL projection of Gaussians: with separate bounds for means and covariances, or with one bound for both.

As for tokens, the solution lies on the geometric mixture of the old policy p and the new policy p̃, `q ∝ p^{1−τ} p̃^τ`,
at the root of KL(τ) = ε; and the gradient is that of the mixture at a fixed τ, less its part along the mixture (KKT).

In coordinates where the old policy is N(0, I), let P be the new precision `BᵀB`, `B = L⁻¹L₀`, and R the factor of the
projected covariance, so that `L_q = L₀R`. With `Q = L_qᵀ (∂ℓ/∂Σ_q) L_q`, `E = Rᵀ(P − I)R` and `Y = L⁻¹L_q`,

    ∂ℓ/∂L = 2τ · tril( L⁻ᵀ Y [ Q − E · tr(QE)/tr(E²) ] Yᵀ ) .

Q without its component along E: the Gaussian form of `g − C (s − μ)/σ²` for tokens. With the mean under the same bound,
`μ_q − μ₀ = L_q v`, let `z = v − τEv`, `u = L_qᵀ ∂ℓ/∂μ_q`, `e = L⁻¹(μ − μ_q)`, `σ² = ½ tr(E²) + ‖z‖²/τ²` and
`c = (uᵀz/τ − tr(QE))/(τσ²)`. Then

    ∂ℓ/∂μ = τ · L⁻ᵀ Y (u − c z)
    ∂ℓ/∂L = 2τ · tril( L⁻ᵀ [ Y (Q + ½cτE) Yᵀ − ½ Y (u − c z) eᵀ − ½ e (u − c z)ᵀ Yᵀ ] ) .
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.gaussian.curve import root
from troll.gaussian.divergence import (
    covariance_kl_diagonal,
    covariance_kl_full,
    mahalanobis_diagonal,
    mahalanobis_full,
    whitened,
)
from troll.gaussian.policy import DiagonalGaussian, Gaussian, Policy, check_pair, spread_of
from troll.gaussian.projection import GaussianProjection, Geometry, separately
from troll.gaussian.triangular import covariance_gradient, inner, inverse_root
from troll.trust_region.projection import broadcast_bound


def project_kl(
    new: Policy, old: Policy, mean_bound: float | Tensor, covariance_bound: float | Tensor
) -> GaussianProjection[Policy]:
    r"""Projects means and covariances separately onto KL balls around the old policy.

    KL(q ‖ p) of two Gaussians is a sum of two parts, each with a bound:

        ½ ‖L₀⁻¹(μ_q − μ₀)‖² ≤ ε_μ,     ½ [ tr(Σ₀⁻¹Σ_q) − d − log det(Σ₀⁻¹Σ_q) ] ≤ ε_Σ .

    A mean outside moves along the straight line to the old one, by √(ε_μ / distance): the nearest point in the metric
    of Σ₀. A covariance outside becomes `Σ_q⁻¹ = (1−τ)Σ₀⁻¹ + τΣ⁻¹` with the one τ that meets the bound: the nearest
    by KL(q ‖ p̃). Gradients reach the new policy only, and are exact. Everything is computed in float64; the rounding of
    a float32 policy can exceed the bound where |μ|/σ or the condition number of L₀ is large (see docs/gaussian.md).

    Args:
        new: p̃, the policy to project; means (..., d), covariances one for each state or shared.
        old: p, of the same kind, dimension and dtype; its states broadcast with those of `new`.
        mean_bound: ε_μ > 0 in nats, a float or a tensor that broadcasts to the states; infinity never projects.
        covariance_bound: ε_Σ > 0 in nats, likewise, for each covariance.

    Returns:
        The projection. A covariance that the states of both policies share stays one covariance.

    Raises:
        ValueError: If the policies do not fit, or a bound is not above 0 or does not broadcast.
    """
    return separately(new, old, mean_bound, covariance_bound, GEOMETRIES[type(new)])


def project_joint_kl(new: Policy, old: Policy, kl_bound: float | Tensor) -> GaussianProjection[Policy]:
    r"""Solves `min_q KL(q ‖ p̃)` subject to `KL(q ‖ p) ≤ ε` at every state: one η for mean and covariance.

    With τ = 1/(1 + η), the solution is the geometric mixture of both policies where `KL(q ‖ p) = ε`:

        Σ_q⁻¹ = (1−τ)Σ₀⁻¹ + τΣ⁻¹,     Σ_q⁻¹ μ_q = (1−τ)Σ₀⁻¹μ₀ + τΣ⁻¹μ .

    Gradients reach the new policy only, and are exact. Everything is computed in float64; on float32
    policies see `project_kl`.

    Args:
        new: p̃, the policy to project; means (..., d).
        old: p, of the same kind, dimension and dtype; its states broadcast with those of `new`.
        kl_bound: ε > 0 in nats, a float or a tensor that broadcasts to the states; infinity never projects.

    Returns:
        The projection. Each state has its own η, so there is a covariance for each state even if all shared one.

    Raises:
        ValueError: If the policies do not fit, or the bound is not above 0 or does not broadcast.
    """
    check_pair(new, old)
    full = isinstance(new, Gaussian)
    batch, d = torch.broadcast_shapes(new.mean.shape, old.mean.shape)[:-1], new.mean.shape[-1]
    event = (d, d) if full else (d,)
    mean, old_mean = (x.expand(*batch, d).reshape(-1, d) for x in (new.mean, old.mean.detach()))
    spread, old_spread = (
        x.expand(*batch, *event).reshape(-1, *event) for x in (spread_of(new), spread_of(old).detach())
    )
    with torch.no_grad():
        geometry = GEOMETRIES[type(new)]
        mean_before = geometry.mean_distance(mean.double() - old_mean.double(), old_spread.double())
        (covariance_before,) = geometry.covariance_distance(spread.double(), old_spread.double())
    bound = broadcast_bound(kl_bound, batch, mean_before).reshape(-1)
    outside = mean_before + covariance_before > bound
    rows = outside.nonzero().squeeze(-1)
    tau = torch.ones_like(mean_before)
    if rows.numel():
        function = _FullOntoBall if full else _DiagonalOntoBall
        centre = old_mean[rows].double()
        projected, shift, tau[rows] = function.apply(
            spread[rows].double(), mean[rows].double() - centre, old_spread[rows].double(), bound[rows]
        )
        mean = mean.index_copy(0, rows, (centre + shift).to(mean.dtype))
        spread = spread.index_copy(0, rows, projected.to(spread.dtype))

    multiplier = ((1 - tau) / tau).view(batch).to(mean.dtype)
    return GaussianProjection(
        type(new)(mean.reshape(*batch, d), spread.reshape(*batch, *event)),
        mean_before.view(batch).to(mean.dtype),
        covariance_before.view(batch).to(mean.dtype),
        multiplier,
        multiplier,
        outside.view(batch),
        outside.view(batch),
    )


GEOMETRIES: dict[type, Geometry] = {
    Gaussian: Geometry(
        mahalanobis_full,
        lambda new, old: (covariance_kl_full(new, old),),
        lambda new, old, bound, _: _FullOntoBall.apply(new, None, old, bound)[::2],
    ),
    DiagonalGaussian: Geometry(
        mahalanobis_diagonal,
        lambda new, old: (covariance_kl_diagonal(new, old),),
        lambda new, old, bound, _: _DiagonalOntoBall.apply(new, None, old, bound)[::2],
    ),
}


class _FullOntoBall(torch.autograd.Function):
    """Factors (N, d, d) outside their balls, and `μ − μ₀`, (N, d), or None: projected, with τ, (N,)."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, delta: Tensor | None, old: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        # B − I = L⁻¹(L₀ − L), so that P − I does not cancel where the policies are close.
        change = torch.linalg.solve_triangular(new, old - new, upper=False)
        change = change + change.mT + change.mT @ change
        identity = torch.eye(new.shape[-1], dtype=new.dtype, device=new.device)
        if delta is None:
            tau = root(torch.linalg.eigvalsh(change), None, bound)
            v = pull = shift = None
        else:
            a, vectors = torch.linalg.eigh(change)
            start = whitened(delta, old)
            pull = start + (change @ start.unsqueeze(-1)).squeeze(-1)  # P L₀⁻¹(μ − μ₀)
            tau = root(a, (vectors.mT @ pull.unsqueeze(-1)).squeeze(-1), bound)
        weight = tau[:, None, None]
        relative = inverse_root(identity + weight * change)
        factor = old @ relative
        along = relative.mT @ change @ relative
        if pull is not None:
            v = tau.unsqueeze(-1) * (relative.mT @ pull.unsqueeze(-1)).squeeze(-1)
            shift = (factor @ v.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(new, delta, factor, shift, along, v, tau)
        ctx.mark_non_differentiable(tau)
        return factor, shift, tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_shift: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        new, delta, factor, shift, along, v, tau = ctx.saved_tensors
        weight = tau[:, None, None]
        towards = torch.linalg.solve_triangular(new, factor, upper=False)  # Y
        q = covariance_gradient(factor, grad)
        if delta is None:
            rest = q - along * (inner(q, along) / inner(along, along)).nan_to_num(0.0, 0.0, 0.0)[:, None, None]
            middle = towards @ rest @ towards.mT
            return 2 * weight * _transposed_solve(new, middle).tril(), None, None, None

        u = (factor.mT @ grad_shift.unsqueeze(-1)).squeeze(-1)
        z = v - tau.unsqueeze(-1) * (along @ v.unsqueeze(-1)).squeeze(-1)
        scale = _speed(u, z, -inner(q, along), inner(along, along), tau)
        u = (towards @ (u - scale.unsqueeze(-1) * z).unsqueeze(-1)).squeeze(-1)
        left = whitened(delta - shift, new)
        middle = towards @ (q + (0.5 * scale * tau)[:, None, None] * along) @ towards.mT
        middle = middle - 0.5 * (u.unsqueeze(-1) * left.unsqueeze(-2) + left.unsqueeze(-1) * u.unsqueeze(-2))
        grad_new = 2 * weight * _transposed_solve(new, middle).tril()
        return grad_new, tau.unsqueeze(-1) * _transposed_solve(new, u.unsqueeze(-1)).squeeze(-1), None, None


class _DiagonalOntoBall(torch.autograd.Function):
    """Standard deviations (N, d) outside their balls, and `μ − μ₀`, (N, d), or None: projected, with τ, (N,).

    The same as `_FullOntoBall` with diagonal matrices.
    """

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, delta: Tensor | None, old: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        change = (old - new) / new
        change = change * (2 + change)  # σ₀²/σ² − 1
        pull = None if delta is None else (1 + change) * delta / old
        tau = root(change, pull, bound)
        growth = 1 + tau.unsqueeze(-1) * change
        scale = old * growth.rsqrt()
        v = shift = None
        if pull is not None:
            v = tau.unsqueeze(-1) * pull * growth.rsqrt()
            shift = scale * v
        ctx.save_for_backward(new, delta, scale, shift, change / growth, v, tau)
        ctx.mark_non_differentiable(tau)
        return scale, shift, tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_shift: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        new, delta, scale, shift, along, v, tau = ctx.saved_tensors
        weight = 2 * tau.unsqueeze(-1) / new
        towards = scale / new
        q = 0.5 * scale * grad
        mixed, squared = (q * along).sum(-1), along.square().sum(-1)
        if delta is None:
            rest = q - along * (mixed / squared).nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1)
            return weight * towards.square() * rest, None, None, None

        u = scale * grad_shift
        z = v * (1 - tau.unsqueeze(-1) * along)
        speed = _speed(u, z, -mixed, squared, tau)
        u = towards * (u - speed.unsqueeze(-1) * z)
        middle = towards.square() * (q + (0.5 * speed * tau).unsqueeze(-1) * along) - u * (delta - shift) / new
        return weight * middle, tau.unsqueeze(-1) * u / new, None, None


def _speed(u: Tensor, z: Tensor, covariance: Tensor, squared: Tensor, tau: Tensor) -> Tensor:
    """dℓ/dτ divided by dKL/dτ, (N,): the constraint subtracts this multiple of dKL from the gradient at a fixed τ."""
    variance = 0.5 * squared + z.square().sum(-1) / tau.square()
    return ((covariance + (u * z).sum(-1) / tau) / (tau * variance)).nan_to_num(0.0, 0.0, 0.0)


def _transposed_solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor.mT, right, upper=True)
