"""The curve KL(τ) of Gaussians, which the core's solvers see."""

import pytest
import torch

from tests.troll.gaussian.pairs import mixture, policies
from troll import gaussian
from troll.gaussian import Gaussian
from troll.gaussian.curve import GaussianCurve, root


def curve_of(new: Gaussian, old: Gaussian, joint: bool) -> GaussianCurve:
    ratio = torch.linalg.solve_triangular(new.factor, old.factor, upper=False)
    values, vectors = torch.linalg.eigh(ratio.mT @ ratio)
    start = torch.linalg.solve_triangular(old.factor, (new.mean - old.mean).unsqueeze(-1), upper=False)
    return GaussianCurve(values - 1, values * (vectors.mT @ start).squeeze(-1) if joint else None)


@pytest.mark.parametrize("joint", [False, True])
def test_curve_is_the_divergence_of_the_mixture(joint: bool) -> None:
    new, old = policies(Gaussian, (4,), 3)
    curve = curve_of(new, old, joint)
    for tau in (0.1, 0.6, 1.0):
        mean, sigma = mixture(new, old, tau)
        mixed = Gaussian(mean if joint else old.mean, torch.linalg.cholesky(sigma))
        torch.testing.assert_close(curve.at(torch.full((4,), tau, dtype=torch.float64)).kl, gaussian.kl(mixed, old))


@pytest.mark.parametrize("joint", [False, True])
def test_variance_is_the_slope_over_tau(joint: bool) -> None:
    new, old = policies(Gaussian, (4,), 3)
    curve = curve_of(new, old, joint)
    tau = torch.tensor([0.05, 0.3, 0.7, 0.99], dtype=torch.float64, requires_grad=True)
    at = curve.at(tau)
    (slope,) = torch.autograd.grad(at.kl.sum(), tau)
    torch.testing.assert_close(slope, (tau * at.variance).detach())
    torch.testing.assert_close(curve.variance_at_zero(), curve.at(torch.zeros(4).double()).variance)


def test_roots_of_extreme_curves() -> None:
    """Ratios of variances from 1e-12 to 1e24, and means up to 1e12 standard deviations apart, where KL(τ) is a step."""
    a = torch.logspace(-12, 24, 37, dtype=torch.float64) - 1
    b = torch.logspace(-3, 12, 16, dtype=torch.float64)
    a, b = (x.flatten().unsqueeze(-1) for x in torch.meshgrid(a, b, indexing="ij"))
    for bound in (1e-8, 1e-3, 0.1, 10.0):
        for of, means in ((a, b), (a, None)):
            outside = GaussianCurve(of, means).at(torch.ones(len(of), dtype=torch.float64)).kl > bound
            of, means = of[outside], None if means is None else means[outside]
            bounds = torch.full((len(of),), bound, dtype=torch.float64)
            tau = root(of, means, bounds)
            torch.testing.assert_close(GaussianCurve(of, means).at(tau).kl, bounds, rtol=1e-9, atol=0)
