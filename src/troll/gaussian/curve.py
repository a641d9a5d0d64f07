r"""KL(τ) of Gaussians, for the solver of the token case.

The geometric mixture `q ∝ p^{1−τ} p̃^τ` of two Gaussians is a Gaussian: `Σ_τ⁻¹ = (1−τ)Σ₀⁻¹ + τΣ⁻¹`. Let a be the
eigenvalues of `L₀ᵀΣ⁻¹L₀ − I`. In their eigenvectors everything is a sum,

    KL(τ) = ½ Σ_i [ log(1 + τa_i) − τa_i/(1 + τa_i) ]  +  ½ Σ_i ( τ b_i/(1 + τa_i) )²
    KL′(τ) = τ σ²,   σ² = ½ Σ_i ( a_i/(1 + τa_i) )²  +  Σ_i b_i²/(1 + τa_i)³ ,

where b is `L₀ᵀΣ⁻¹(μ − μ₀)` in these eigenvectors, or absent if the means have a separate bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.gaussian.divergence import excess
from troll.trust_region.dual import Moments, newton


class GaussianCurve:
    """KL(τ) of R pairs of Gaussians, each with a root of its own: a `Curve` of the core.

    Args:
        a: Eigenvalues of `L₀ᵀΣ⁻¹L₀ − I`, above −1, (R, d), float64.
        b: `L₀ᵀΣ⁻¹(μ − μ₀)` in the eigenvectors, (R, d); None for the KL of covariances only.
    """

    def __init__(self, a: Tensor, b: Tensor | None = None) -> None:
        # Rounding may bring an eigenvalue of a far pair to −1, where KL(1) would be infinite.
        self.a, self.b = a.clamp(min=-1 + 1e-15), b

    def at(self, tau: Tensor) -> Moments:
        """KL(τ) and σ² at (R,) values of τ."""
        change = tau.unsqueeze(-1) * self.a
        growth = 1 + change
        # log(1 + x) − x/(1 + x) = e(−log(1 + x)), which does not cancel.
        kl = 0.5 * excess(-torch.log1p(change)).sum(-1)
        variance = 0.5 * (self.a / growth).square().sum(-1)
        if self.b is not None:
            moved = (self.b / growth).square()
            kl = kl + 0.5 * tau.square() * moved.sum(-1)
            variance = variance + (moved / growth).sum(-1)
        return Moments(kl, variance)

    def variance_at_zero(self) -> Tensor:
        """σ² at τ = 0, (R,)."""
        variance = 0.5 * self.a.square().sum(-1)
        return variance if self.b is None else variance + self.b.square().sum(-1)

    def narrow(self, roots: Tensor) -> None:
        """Keeps some of the R roots, by their indices (R',) int64, ascending."""
        self.a, self.b = self.a[roots], None if self.b is None else self.b[roots]


def root(a: Tensor, b: Tensor | None, kl_bound: Tensor) -> Tensor:
    """τ in (0, 1) where KL(τ) meets the bound, (R,)."""
    # KL depends on τa and τb only. So the curve up to a number that no root exceeds is a curve of the same kind, and
    # the solver need not search all magnitudes where a new policy is 1e12 times narrower than the old one.
    reach = _reach(a, b, kl_bound).unsqueeze(-1)
    curve = GaussianCurve(reach * a, None if b is None else reach * b)
    return reach.squeeze(-1) * newton(curve, kl_bound).tau


def _reach(a: Tensor, b: Tensor | None, kl_bound: Tensor) -> Tensor:
    """A number in (0, 1] that the root does not exceed, (R,): no single term of KL(τ) may exceed the bound."""
    # log(1 + x) − x/(1 + x) ≥ log(1 + x) − 1, so τ max a ≤ e^{2ε + 1}.
    inverse = a.amax(-1) / torch.exp(2 * kl_bound + 1)
    if b is not None:
        # τ|b| ≤ √(2ε) (1 + τa)
        step = torch.sqrt(2 * kl_bound).unsqueeze(-1)
        inverse = torch.maximum(inverse, (b.abs() / step - a).amax(-1))
    return 1 / (0.999 * inverse).clamp(min=1)
