"""Covariances as parameters, and writing a projected one back."""

import pytest
import torch

from tests.troll.gaussian.pairs import policies
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_written_back_factor_is_the_projected_one(dtype: torch.dtype) -> None:
    new, old = policies(Gaussian, (6,), 4)
    new, old = (Gaussian(p.mean.to(dtype), p.factor[0].to(dtype)) for p in (new, old))
    parameters = torch.nn.Parameter(torch.randn(4, 4, dtype=dtype))
    above = parameters.detach().triu(1)
    projection = gaussian.project_kl(new, old, torch.inf, 0.01)
    gaussian.write_back(parameters, projection.policy)
    acting = Gaussian(old.mean, gaussian.factor_from(parameters))
    torch.testing.assert_close(acting.factor, projection.policy.factor)
    relative = 1e-9 if dtype == torch.float64 else 1e-3
    assert gaussian.kl(acting, old)[0].item() == pytest.approx(0.01, rel=relative)
    assert torch.equal(parameters.detach().triu(1), above)
    assert parameters.requires_grad and parameters.is_leaf


def test_written_back_scale_is_the_projected_one() -> None:
    new, old = policies(DiagonalGaussian, (6,), 4)
    new, old = (DiagonalGaussian(p.mean, p.scale[0]) for p in (new, old))
    parameters = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    projection = gaussian.project_kl(new, old, torch.inf, 0.01)
    gaussian.write_back(parameters, projection.policy)
    torch.testing.assert_close(gaussian.scale_from(parameters), projection.policy.scale, rtol=1e-14, atol=0)


def test_write_back_brings_trained_policy_inside() -> None:
    """Updates that only push outwards: the pull holds the network near the bound, writing back puts it there."""
    old = Gaussian(torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    parameters = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    optimizer = torch.optim.Adam([parameters], lr=0.05)
    for _ in range(20):
        new = Gaussian(old.mean, gaussian.factor_from(parameters))
        projection = gaussian.project_kl(new, old, torch.inf, 0.005)
        loss = new.factor[1, 0] + gaussian.trust_region_loss(new, projection)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    new = Gaussian(old.mean, gaussian.factor_from(parameters))
    assert gaussian.kl(new, old) > 1.05 * 0.005
    gaussian.write_back(parameters, gaussian.project_kl(new, old, torch.inf, 0.005).policy)
    after = gaussian.kl(Gaussian(old.mean, gaussian.factor_from(parameters)), old)
    assert after.item() == pytest.approx(0.005, rel=1e-9)


def test_write_back_refuses_other_shape() -> None:
    policy = policies(Gaussian, (2,), 3)[0]
    with pytest.raises(ValueError, match=r"parameters must be \(2, 3, 3\), got \(3, 3\)"):
        gaussian.write_back(torch.zeros(3, 3, dtype=torch.float64), policy)
