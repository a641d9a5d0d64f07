"""The Wasserstein-2 projection against the distance's definition by matrix square roots, and another solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.optimize import minimize

from tests.gaussian.pairs import Array, covariance, diagonal_as_full, policies
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian


def bures(a: Array, b: Array) -> float:
    """tr(A + B − 2 (B^½ A B^½)^½)."""
    root = np.real(sqrtm(b))
    return float(np.trace(a + b) - 2 * np.sqrt(np.clip(np.linalg.eigvalsh(root @ a @ root), 0, None)).sum())


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_wasserstein_projection_is_on_the_geodesic(kind: type) -> None:
    new, old = policies(kind, (6,), 4)
    projection = gaussian.project_wasserstein(new, old, 0.1, 0.05)
    assert projection.covariance_projected.all()
    for i in range(6):
        start, q, end = (covariance(p)[i].numpy() for p in (old, projection.policy, new))
        if kind is Gaussian:
            assert np.abs(start @ end - end @ start).max() > 0.1, "they do not commute"
        assert projection.covariance_before[i].item() == pytest.approx(bures(end, start), rel=1e-8)
        assert bures(q, start) == pytest.approx(0.05, rel=1e-8)
        # The distances to both ends add up, so the triangle inequality leaves no nearer point of the ball.
        assert np.sqrt(bures(q, start)) + np.sqrt(bures(end, q)) == pytest.approx(np.sqrt(bures(end, start)), rel=1e-7)


@pytest.mark.parametrize("seed", [0, 1])
def test_wasserstein_projection_solves_the_primal_problem(seed: int) -> None:
    new, old = policies(Gaussian, (), 3, seed)
    found = gaussian.project_wasserstein(new, old, 1.0, 0.05).policy
    target, centre = covariance(new).numpy(), covariance(old).numpy()

    def sigma(x: np.ndarray) -> np.ndarray:
        root = np.zeros((3, 3))
        root[np.tril_indices(3)] = x
        return root @ root.T

    solved = minimize(
        lambda x: bures(sigma(x), target),
        old.factor.numpy()[np.tril_indices(3)],
        constraints=[{"type": "ineq", "fun": lambda x: 0.05 - bures(sigma(x), centre)}],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.success
    torch.testing.assert_close(covariance(found), torch.as_tensor(sigma(solved.x)), rtol=2e-3, atol=1e-3)
    assert bures(covariance(found).numpy(), target) <= solved.fun + 1e-7


def test_covariances_that_commute_move_on_straight_lines_of_standard_deviations() -> None:
    new, old = policies(DiagonalGaussian, (5,), 4)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def turned(policy: DiagonalGaussian) -> Gaussian:
        sigma = rotation @ covariance(diagonal_as_full(policy)) @ rotation.mT
        return Gaussian(policy.mean, torch.linalg.cholesky(sigma))

    expected = turned(gaussian.project_wasserstein(new, old, 0.1, 0.05).policy)
    found = gaussian.project_wasserstein(turned(new), turned(old), 0.1, 0.05).policy
    torch.testing.assert_close(found.factor, expected.factor)
