"""The Frobenius projection against its definition and another solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from tests.gaussian.pairs import covariance, policies
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_frobenius_projection_is_on_the_straight_line(kind: type) -> None:
    new, old = policies(kind, (5,), 3)
    projection = gaussian.project_frobenius(new, old, 0.1, 0.2)
    before, after = covariance(new) - covariance(old), covariance(projection.policy) - covariance(old)
    assert projection.covariance_projected.any()
    torch.testing.assert_close(projection.covariance_before, before.square().sum((-2, -1)))
    torch.testing.assert_close(after, before / (1 + projection.covariance_multiplier)[:, None, None])
    torch.testing.assert_close(after.square().sum((-2, -1)), projection.covariance_before.clamp(max=0.2))
    moved = (new.mean - old.mean) / (1 + projection.mean_multiplier).unsqueeze(-1)
    torch.testing.assert_close(projection.policy.mean - old.mean, moved)


@pytest.mark.parametrize("seed", [0, 1])
def test_frobenius_projection_solves_the_primal_problem(seed: int) -> None:
    new, old = policies(Gaussian, (), 3, seed)
    found = gaussian.project_frobenius(new, old, 1.0, 0.1).policy
    target, centre = covariance(new).numpy(), covariance(old).numpy()

    def sigma(x: np.ndarray) -> np.ndarray:
        root = np.zeros((3, 3))
        root[np.tril_indices(3)] = x
        return root @ root.T

    solved = minimize(
        lambda x: ((sigma(x) - target) ** 2).sum(),
        old.factor.numpy()[np.tril_indices(3)],
        constraints=[{"type": "ineq", "fun": lambda x: 0.1 - ((sigma(x) - centre) ** 2).sum()}],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-13},
    )
    assert solved.success
    torch.testing.assert_close(covariance(found), torch.as_tensor(sigma(solved.x)), rtol=1e-4, atol=1e-4)
