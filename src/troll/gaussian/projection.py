"""The result of a projection, and the code that all projections share: moving what is outside its ball onto it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from troll.gaussian.policy import Gaussian, Policy, check_pair, spread_of
from troll.trust_region.projection import broadcast_bound


@dataclass(frozen=True, eq=False)
class GaussianProjection(Generic[Policy]):
    """A policy inside its trust region, for states (...). Covariances have separate batch dimensions, (c).

    Distances are those of the projection that was made: KL in nats, or squared Frobenius or Wasserstein distances in
    the units of the actions. τ = 1/(1 + η) is the projected policy's position on the path from the old policy, 0, to
    the new one, 1. `kl_parts(projection.policy, old)` computes how far it is from the old policy.

    Attributes:
        policy: The projected policy, differentiable; bit for bit the new policy where nothing was outside its bound.
        mean_before: Distance of the new mean from the old one, (...), without gradient.
        covariance_before: Distance of the new covariance from the old one, (c), without gradient.
        mean_multiplier: η of the means' bound, (...); 0 where not projected.
        covariance_multiplier: η of the covariances' bound, (c); 0 where not projected.
        mean_projected: (...) bool, true where the mean was outside its bound.
        covariance_projected: (c) bool, true where the covariance was outside its bound.
    """

    policy: Policy
    mean_before: Tensor
    covariance_before: Tensor
    mean_multiplier: Tensor
    covariance_multiplier: Tensor
    mean_projected: Tensor
    covariance_projected: Tensor


class Geometry(NamedTuple):
    """The distances of a kind of projection, and how it moves a covariance onto a ball; all in float64."""

    mean_distance: Callable[[Tensor, Tensor], Tensor]
    """From `μ − μ₀`, (..., d), and the old factor or scale, to (...)."""
    covariance_distance: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    """From the new and the old factor or scale of N covariances, to (N,), and to what `onto_ball` can use again."""
    onto_ball: Callable[..., tuple[Tensor, Tensor]]
    """From new and old factors or scales of N covariances outside their bounds, the bounds, (N,), and all of what
    `covariance_distance` gave, to the projected ones, differentiable in the new ones, and τ, (N,)."""


def separately(
    new: Policy,
    old: Policy,
    mean_bound: float | Tensor,
    covariance_bound: float | Tensor,
    geometry: Geometry,
) -> GaussianProjection[Policy]:
    """Projects means and covariances onto separate balls."""
    check_pair(new, old)
    old_spread = spread_of(old).detach()
    mean, mean_before, mean_tau, mean_outside = _shrunk(
        new.mean, old.mean.detach(), old_spread, mean_bound, geometry.mean_distance
    )

    events = 2 if isinstance(new, Gaussian) else 1
    shape = torch.broadcast_shapes(spread_of(new).shape, old_spread.shape)
    batch = shape[:-events]
    flat, flat_old = (x.expand(shape).reshape(-1, *shape[-events:]) for x in (spread_of(new), old_spread))
    before, *more = geometry.covariance_distance(flat.detach().double(), flat_old.double())
    bound = broadcast_bound(covariance_bound, batch, before, "covariance_bound").reshape(-1)
    outside = before > bound
    rows = outside.nonzero().squeeze(-1)
    tau = torch.ones_like(before)
    if rows.numel():
        projected, tau[rows] = geometry.onto_ball(
            flat[rows].double(), flat_old[rows].double(), bound[rows], before[rows], *(x[rows] for x in more)
        )
        flat = flat.index_copy(0, rows, projected.to(flat.dtype))

    dtype = new.mean.dtype
    return GaussianProjection(
        type(new)(mean, flat.reshape(shape)),
        mean_before.to(dtype),
        before.view(batch).to(dtype),
        ((1 - mean_tau) / mean_tau).to(dtype),
        ((1 - tau) / tau).view(batch).to(dtype),
        mean_outside,
        outside.view(batch),
    )


def along_line(new: Tensor, old: Tensor, distance: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Moves vectors (N, d) towards the old ones, to where a squared distance meets its bound; and τ = √(ε/distance).

    The distance, (N,), must be a differentiable function of the new vectors.
    """
    tau = torch.sqrt(bound / distance)
    return old + tau.unsqueeze(-1) * (new - old), tau.detach()


def _shrunk(
    new: Tensor,
    old: Tensor,
    old_spread: Tensor,
    mean_bound: float | Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean, moved along the straight line to the old one; its distance before, τ, and where it was outside."""
    old, old_spread = old.double(), old_spread.double()
    before = distance(new.double() - old, old_spread)
    bound = broadcast_bound(mean_bound, before.shape, before, "mean_bound")
    outside = before.detach() > bound
    # No division by 0, and no infinity, enters the gradient of what is not moved.
    tau = torch.sqrt(torch.where(outside, bound, 1.0) / torch.where(outside, before, 1.0))
    moved = old + tau.unsqueeze(-1) * (new.double() - old)
    mean = torch.where(outside.unsqueeze(-1), moved.to(new.dtype), new)
    return mean, before.detach(), tau.detach(), outside
