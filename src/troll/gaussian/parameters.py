"""Covariances as parameters of a network, and writing a projected covariance back into them.

The loss uses the projected policy, but the next actions are sampled from the network. A mean that depends on the state
can follow its projection only by training; a covariance that all states share is a parameter, and can be set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.gaussian.policy import DiagonalGaussian, Gaussian, spread_of
from troll.trust_region.checks import check_shape


def factor_from(parameters: Tensor) -> Tensor:
    """A Cholesky factor from any matrix, both (..., d, d): its lower triangle, and the exponential of its diagonal."""
    return parameters.tril(-1) + torch.diag_embed(parameters.diagonal(dim1=-2, dim2=-1).exp())


def scale_from(parameters: Tensor) -> Tensor:
    """Standard deviations, (..., d), from any numbers (..., d): their exponential."""
    return parameters.exp()


@torch.no_grad()
def write_back(parameters: Tensor, policy: Gaussian | DiagonalGaussian) -> None:
    """Sets parameters in place so that the network's own covariance is the projected one, to the last few bits.

    Call it after the last update on a batch, with the policy projected once more. Without it, the policy of the next
    rollout may be outside the trust region, since the pull only moves the network towards the projection.

    Args:
        parameters: The argument of `factor_from`, (..., d, d), or `scale_from`, (..., d), from which the covariance is
            made. The upper triangle of a matrix does not change.
        policy: The projected policy.

    Raises:
        ValueError: If the shape of the parameters is not that of the policy's factor or scale.
    """
    spread = spread_of(policy)
    check_shape("parameters", parameters, spread.shape)
    if isinstance(policy, DiagonalGaussian):
        parameters.copy_(spread.log())
        return
    lower = spread.tril(-1) + torch.diag_embed(spread.diagonal(dim1=-2, dim2=-1).log())
    parameters.copy_(lower + parameters.triu(1))
