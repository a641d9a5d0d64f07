"""KL of Gaussians: torch's own, in batches, and to full precision where policies are close."""

import math

import pytest
import torch
from torch.distributions import kl_divergence

from tests.troll.gaussian.pairs import exact_distances, pair, policies, spread, triangle, with_gradient
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian
from troll.gaussian.divergence import excess


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_kl_is_that_of_torch(kind: type) -> None:
    new, old = policies(kind, (2, 3), 4)
    torch.testing.assert_close(gaussian.kl(new, old), kl_divergence(new.distribution(), old.distribution()))


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_kl_gradient_agrees_with_finite_differences(kind: type) -> None:
    new, old = policies(kind, (2,), 3)
    ones = triangle(kind, 3)
    leaf, other = with_gradient(new), with_gradient(old)
    inputs = (leaf.mean, spread(leaf), other.mean, spread(other))
    assert torch.autograd.gradcheck(lambda m, s, n, t: gaussian.kl(kind(m, s * ones), kind(n, t * ones)), inputs)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-9])
def test_kl_of_close_policies_keeps_its_digits(size: float) -> None:
    new, old = pair("near", 10, 0)
    new = Gaussian(old.mean + size * (new.mean - old.mean), old.factor + size * (new.factor - old.factor))
    found = [part.item() for part in gaussian.kl_parts(new, old)]
    # The pair itself is rounded, relatively by 1e-16/size.
    assert found == pytest.approx(exact_distances("kl", new, old), rel=1e-12 + 1e-15 / size)


@pytest.mark.parametrize("scale", [1e-8, 1e-16, 1e-100])
def test_kl_of_a_far_narrower_policy(scale: float) -> None:
    mean, eye = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    expected = scale**2 - 1 - 2 * math.log(scale)  # half of it for each of two dimensions
    for kind, ones in ((Gaussian, eye), (DiagonalGaussian, torch.ones_like(mean))):
        new = with_gradient(kind(mean, scale * ones))
        kl = gaussian.kl(new, kind(mean, ones))
        assert kl.item() == pytest.approx(expected, rel=1e-14)
        (gradient,) = torch.autograd.grad(kl, spread(new))
        assert gradient.flatten()[0].item() == pytest.approx(scale - 1 / scale, rel=1e-14)


def test_kl_of_equal_policies_is_exactly_zero() -> None:
    for kind in (Gaussian, DiagonalGaussian):
        new, _ = policies(kind, (20,), 7)
        assert not gaussian.kl(new, new).any()


def test_covariance_part_of_a_shared_covariance_is_one_number() -> None:
    new, old = policies(Gaussian, (5,), 3)
    new, old = (Gaussian(p.mean, p.factor[0]) for p in (new, old))
    mean, covariance = gaussian.kl_parts(new, old)
    assert mean.shape == (5,) and covariance.shape == ()
    repeated = Gaussian(new.mean, new.factor.expand(5, 3, 3)), Gaussian(old.mean, old.factor.expand(5, 3, 3))
    torch.testing.assert_close(mean + covariance, gaussian.kl(*repeated))


def test_excess_is_accurate_everywhere() -> None:
    mpmath = pytest.importorskip("mpmath")
    y = torch.tensor(
        [s * x for s in (1, -1) for x in (0.0, 1e-12, 1e-5, 0.03, 0.09999, 0.10001, 0.5, 3.0, 40.0)]
    ).double()
    with mpmath.workdps(50):
        expected = [float(mpmath.expm1(mpmath.mpf(x)) - mpmath.mpf(x)) for x in y.tolist()]
    torch.testing.assert_close(excess(y), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(excess, y.clone().requires_grad_(), rtol=1e-5, atol=1e-7)
    assert math.isfinite(excess(torch.tensor(-1e6)).item())
