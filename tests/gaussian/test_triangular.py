"""Lower-triangular roots, and the gradient through a Cholesky decomposition."""

from __future__ import annotations

import torch

from tests.gaussian.pairs import covariance, policies
from troll.gaussian import Gaussian
from troll.gaussian.triangular import covariance_gradient, inverse_root, lower_root


def test_inverse_root_is_a_lower_root_of_the_inverse() -> None:
    precision = covariance(policies(Gaussian, (5,), 4)[0])
    found = inverse_root(precision)
    assert not found.triu(1).any() and (found.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(found @ found.mT, precision.inverse())


def test_lower_root_is_the_cholesky_factor_and_names_the_rotation() -> None:
    root = torch.randn(5, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, rotation = lower_root(root)
    torch.testing.assert_close(found, torch.linalg.cholesky(root @ root.mT))
    torch.testing.assert_close(root @ rotation, found)


def test_lower_root_keeps_the_digits_that_a_covariance_loses() -> None:
    root = torch.tensor([[1.0, 0.0], [1.0, 1e-10]], dtype=torch.float64)
    found, _ = lower_root(root)
    assert abs(found[1, 1].item() - 1e-10) < 1e-15


def test_covariance_gradient_is_that_of_the_cholesky_decomposition() -> None:
    sigma = covariance(policies(Gaussian, (5,), 4)[0]).requires_grad_()
    factor = torch.linalg.cholesky(sigma)
    grad = torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril()
    (expected,) = torch.autograd.grad((factor * grad).sum(), sigma)
    factor = factor.detach()
    torch.testing.assert_close(covariance_gradient(factor, grad), factor.mT @ expected @ factor)
