"""Gaussian policies as values: their checks, and torch's distributions."""

import pytest
import torch
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal

from tests.troll.gaussian.pairs import policies, spread, with_gradient
from troll.gaussian import DiagonalGaussian, Gaussian, from_distribution


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_from_distribution_undoes_distribution(kind: type) -> None:
    policy = with_gradient(policies(kind, (4,), 3)[0])
    back = from_distribution(policy.distribution())
    assert type(back) is kind
    assert torch.equal(back.mean, policy.mean) and torch.equal(spread(back), spread(policy))
    spread(back).sum().backward()
    assert spread(policy).grad is not None
    torch.testing.assert_close(policy.entropy, policy.distribution().entropy())


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_from_distribution_recognises_shared_covariance(kind: type) -> None:
    policy = policies(kind, (4,), 3)[0]
    shared = kind(policy.mean, spread(policy)[0])
    back = from_distribution(shared.distribution())
    assert spread(back).shape == spread(shared).shape
    own = from_distribution(policy.distribution())
    assert spread(own).shape == spread(policy).shape


def test_from_distribution_refuses_others() -> None:
    normal = Normal(torch.zeros(4, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"must be a MultivariateNormal or .*, got Normal"):
        from_distribution(normal)
    with pytest.raises(ValueError, match="got Independent of Normal"):
        from_distribution(Independent(normal, 2))
    with pytest.raises(ValueError, match="got Categorical"):
        from_distribution(Categorical(torch.ones(3)))
    assert isinstance(from_distribution(MultivariateNormal(torch.zeros(2), torch.eye(2))), Gaussian)


@pytest.mark.parametrize(
    ("kind", "mean", "spread", "message"),
    [
        (Gaussian, torch.zeros(()), torch.eye(1), r"mean must be \(\.\.\., d\) with d of at least 1, got \(\)"),
        (Gaussian, torch.zeros(2, 0), torch.zeros(0, 0), r"mean must be .* got \(2, 0\)"),
        (Gaussian, torch.zeros(3), torch.eye(2), r"factor must be \(\.\.\., 3, 3\), got \(2, 2\)"),
        (Gaussian, torch.zeros(3), torch.ones(3), r"factor must be \(\.\.\., 3, 3\), got \(3,\)"),
        (DiagonalGaussian, torch.zeros(3), torch.ones(2), r"scale must be \(\.\.\., 3\), got \(2,\)"),
        (Gaussian, torch.zeros(3), torch.eye(3).expand(4, 3, 3), r"the states of the mean, \(\), got \(4,\)"),
        (DiagonalGaussian, torch.zeros(2, 3), torch.ones(4, 3), r"the states of the mean, \(2,\), got \(4,\)"),
        (Gaussian, torch.zeros(2), torch.eye(2).double(), "got torch.float32 and torch.float64"),
        (Gaussian, torch.zeros(2).half(), torch.eye(2).half(), "got torch.float16 and torch.float16"),
        (Gaussian, torch.zeros(2), torch.diag(torch.tensor([1.0, -2.0])), r"above 0 on its diagonal, got -2\.0"),
        (Gaussian, torch.zeros(2), torch.full((2, 2), torch.nan).tril(), "factor must be finite, got nan or infinity"),
        (DiagonalGaussian, torch.full((2,), torch.inf), torch.ones(2), "mean must be finite, got nan or infinity"),
        (Gaussian, torch.zeros(2), torch.ones(2, 2), "factor must be lower triangular, got nonzero numbers above"),
        (DiagonalGaussian, torch.zeros(2), torch.tensor([0.0, 1.0]), r"scale must be above 0 everywhere, got 0\.0"),
    ],
)
def test_policy_refuses_bad_parameters(kind: type, mean: torch.Tensor, spread: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(mean, spread)
