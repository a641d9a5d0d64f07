"""Gaussian policies: a mean with a Cholesky factor, or with standard deviations; and torch's distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

Policy = TypeVar("Policy", "Gaussian", "DiagonalGaussian")


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Normal distributions `N(mean, factor factorᵀ)` over R^d, one for each state (...).

    The factor may have fewer batch dimensions than the mean: (d, d) is one covariance that all states share.

    Attributes:
        mean: (..., d), float32 or float64.
        factor: Cholesky factor of the covariance, (..., d, d), lower triangular with a positive diagonal.

    Raises:
        ValueError: If a shape or dtype does not fit, or (checked on a CPU only) a number is not finite
            or the factor is not lower triangular with a positive diagonal.
    """

    mean: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        _check(self.mean, self.factor, "factor", events=2)
        if self.factor.device.type == "cpu" and bool(self.factor.detach().triu(1).any()):
            raise ValueError("factor must be lower triangular, got nonzero numbers above its diagonal")

    @property
    def entropy(self) -> Tensor:
        """`½ d log(2πe) + log det factor`, in nats: one number for each covariance, (...); differentiable."""
        return _entropy(self.factor.diagonal(dim1=-2, dim2=-1))

    def distribution(self) -> MultivariateNormal:
        """The policy as a distribution of torch, which samples and evaluates densities."""
        return MultivariateNormal(self.mean, scale_tril=self.factor)


@dataclass(frozen=True, eq=False)
class DiagonalGaussian:
    """Normal distributions `N(mean, diag(scale²))` over R^d, one for each state (...).

    The scale may have fewer batch dimensions than the mean: (d,) is one covariance that all states share.

    Attributes:
        mean: (..., d), float32 or float64.
        scale: Standard deviations, (..., d), above 0.

    Raises:
        ValueError: If a shape or dtype does not fit, or (checked on a CPU only) a number is not finite
            or a scale not above 0.
    """

    mean: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        _check(self.mean, self.scale, "scale", events=1)

    @property
    def entropy(self) -> Tensor:
        """`½ d log(2πe) + Σ log scale`, in nats: one number for each covariance, (...); differentiable."""
        return _entropy(self.scale)

    def distribution(self) -> Independent:
        """The policy as a distribution of torch, which samples and evaluates densities."""
        return Independent(Normal(self.mean, self.scale), 1)


def from_distribution(distribution: Distribution) -> Gaussian | DiagonalGaussian:
    """Converts a distribution of torch to a policy; gradients flow through.

    A covariance that torch expands to all states, as a view, is recognised and stays one covariance.

    Args:
        distribution: `MultivariateNormal`, or `Independent(Normal(...), 1)`.

    Raises:
        ValueError: If it is another distribution.
    """
    if isinstance(distribution, MultivariateNormal):
        return Gaussian(distribution.loc, _unrepeated(distribution.scale_tril, events=2))
    if (
        isinstance(distribution, Independent)
        and isinstance(distribution.base_dist, Normal)
        and distribution.reinterpreted_batch_ndims == 1
    ):
        return DiagonalGaussian(distribution.base_dist.loc, _unrepeated(distribution.base_dist.scale, events=1))
    raise ValueError(
        f"distribution must be a MultivariateNormal or Independent(Normal(...), 1), got {type(distribution).__name__}"
        + (f" of {type(distribution.base_dist).__name__}" if isinstance(distribution, Independent) else "")
    )


def spread_of(policy: Gaussian | DiagonalGaussian) -> Tensor:
    """The factor, (..., d, d), or the scale, (..., d)."""
    return policy.factor if isinstance(policy, Gaussian) else policy.scale


def check_pair(new: Policy, old: Policy) -> None:
    """Raises ValueError unless two policies are of one kind, dimension and dtype, and their states broadcast."""
    if type(new) is not type(old):
        raise ValueError(f"new and old must be of one kind, got {type(new).__name__} and {type(old).__name__}")
    for what, a, b in (
        ("dtype", new.mean.dtype, old.mean.dtype),
        ("dimension", new.mean.shape[-1], old.mean.shape[-1]),
    ):
        if a != b:
            raise ValueError(f"new and old must have one {what}, got {a} and {b}")
    try:
        torch.broadcast_shapes(new.mean.shape, old.mean.shape)
        torch.broadcast_shapes(spread_of(new).shape, spread_of(old).shape)
    except RuntimeError:
        raise ValueError(
            "the states of new and old must broadcast, got means "
            f"{tuple(new.mean.shape)} and {tuple(old.mean.shape)}, "
            f"covariances {tuple(spread_of(new).shape)} and {tuple(spread_of(old).shape)}"
        ) from None


def _check(mean: Tensor, spread: Tensor, name: str, events: int) -> None:
    if mean.dim() == 0 or mean.shape[-1] == 0:
        raise ValueError(f"mean must be (..., d) with d of at least 1, got {tuple(mean.shape)}")
    if mean.dtype not in (torch.float32, torch.float64) or spread.dtype != mean.dtype:
        raise ValueError(f"mean and {name} must both be float32 or both float64, got {mean.dtype} and {spread.dtype}")
    d = mean.shape[-1]
    if tuple(spread.shape[-events:]) != (d,) * events:
        raise ValueError(f"{name} must be (..., {', '.join([str(d)] * events)}), got {tuple(spread.shape)}")
    try:
        states = torch.broadcast_shapes(mean.shape[:-1], spread.shape[:-events])
    except RuntimeError:
        states = None
    if states != mean.shape[:-1]:
        raise ValueError(
            f"{name} must broadcast to the states of the mean, {tuple(mean.shape[:-1])}, "
            f"got {tuple(spread.shape[:-events])}"
        )
    if mean.device.type != "cpu":
        return
    for argument, tensor in (("mean", mean), (name, spread)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{argument} must be finite, got nan or infinity")
    diagonal = spread if events == 1 else spread.diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal > 0).all()):
        place = "everywhere" if events == 1 else "on its diagonal"
        raise ValueError(f"{name} must be above 0 {place}, got {diagonal.detach().min().item()}")


def _entropy(diagonal: Tensor) -> Tensor:
    return diagonal.log().sum(-1) + 0.5 * diagonal.shape[-1] * math.log(2 * math.pi * math.e)


def _unrepeated(spread: Tensor, events: int) -> Tensor:
    while spread.dim() > events and (spread.stride(0) == 0 or spread.shape[0] == 1):
        spread = spread[0]
    return spread
