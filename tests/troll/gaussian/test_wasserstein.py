"""The Wasserstein-2 projection against the distance's definition by matrix square roots, and another solver."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from tests.troll.gaussian.pairs import Array, covariance, nearest_covariance, policies
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
    solved, least = nearest_covariance(
        lambda sigma: bures(sigma, target),
        lambda sigma: 0.05 - bures(sigma, centre),
        start=old.factor.numpy(),
        ftol=1e-12,
    )
    torch.testing.assert_close(covariance(found), torch.as_tensor(solved), rtol=2e-3, atol=1e-3)
    assert bures(covariance(found).numpy(), target) <= least + 1e-7
