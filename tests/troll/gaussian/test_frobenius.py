"""The Frobenius projection against its definition and another solver."""

import pytest
import torch

from tests.troll.gaussian.pairs import covariance, nearest_covariance, policies
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
    solved, _ = nearest_covariance(
        lambda sigma: ((sigma - target) ** 2).sum(),
        lambda sigma: 0.1 - ((sigma - centre) ** 2).sum(),
        start=old.factor.numpy(),
        ftol=1e-13,
    )
    torch.testing.assert_close(covariance(found), torch.as_tensor(solved), rtol=1e-4, atol=1e-4)
