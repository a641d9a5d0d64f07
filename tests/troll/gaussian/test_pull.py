"""The pull of the network to its projection."""

import pytest
import torch

from tests.troll.gaussian.pairs import PROJECTIONS, detached, policies, spread, with_gradient
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_pull_is_the_divergence_from_the_projection(name: str, kind: type) -> None:
    new, old = policies(kind, (5,), 3)
    new = with_gradient(new)
    projection = PROJECTIONS[name](new, old, 0.05, 0.02)
    pull = gaussian.trust_region_loss(new, projection)
    torch.testing.assert_close(pull, gaussian.kl(new, projection.policy))
    grads = torch.autograd.grad(pull.sum(), (new.mean, spread(new)))
    direct = gaussian.kl(new, detached(projection.policy)).sum()
    for grad, expected in zip(grads, torch.autograd.grad(direct, (new.mean, spread(new))), strict=True):
        assert torch.equal(grad, expected), "no gradient goes through the projection"


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_pull_is_exactly_zero_where_nothing_is_projected(kind: type) -> None:
    new, old = policies(kind, (6,), 3)
    new = with_gradient(new)
    bounds = torch.tensor([1e-3, torch.inf] * 3, dtype=torch.float64)
    pull = gaussian.trust_region_loss(new, gaussian.project_kl(new, old, bounds, bounds))
    assert (pull > 0).tolist() == [True, False] * 3
    for grad in torch.autograd.grad(pull.sum(), (new.mean, spread(new))):
        assert not grad[1::2].any() and grad[::2].any()


def test_pull_of_a_shared_covariance_counts_once_in_the_mean() -> None:
    new, old = policies(Gaussian, (5,), 3)
    new = with_gradient(Gaussian(new.mean, new.factor[0]))
    projection = gaussian.project_kl(new, Gaussian(old.mean, old.factor[0]), torch.inf, 0.02)
    pull = gaussian.trust_region_loss(new, projection)
    assert pull.shape == (5,)
    one = gaussian.kl_parts(new, projection.policy)[1]
    torch.testing.assert_close(pull.mean(), one)
