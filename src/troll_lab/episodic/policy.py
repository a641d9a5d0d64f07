"""The policy over movements: a Gaussian over a primitive's weights, whose full covariance couples times and joints."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from troll.gaussian import Gaussian, factor_from, write_back
from troll_lab.episodic.prodmp import ProDMP


class MovementPolicy(nn.Module):
    """A network from the context of an episode, its first observation, to a Gaussian over the weights of a movement.

    Everything is float64: likelihoods of positions are nearly singular, and the networks are small.

    Args:
        context_size: Size of a context.
        num_weights: d, the number of weights of a movement.
        hidden: Units in each of the two hidden layers.
        scale: Standard deviation of every weight at the start.
        contextual_covariance: Whether the covariance depends on the context; otherwise all contexts share one.
    """

    def __init__(
        self,
        context_size: int,
        num_weights: int,
        hidden: int = 64,
        scale: float = 0.5,
        contextual_covariance: bool = False,
    ) -> None:
        super().__init__()
        self.num_weights = num_weights
        self.mean = network(context_size, num_weights, hidden, last_layer=0.01)
        # The lower triangle is used, with the logarithm of its diagonal.
        self.factor_parameters = nn.Parameter(math.log(scale) * torch.eye(num_weights, dtype=torch.float64))
        self.factor_offset = (
            network(context_size, num_weights**2, hidden, last_layer=0.01) if contextual_covariance else None
        )

    def forward(self, contexts: Tensor) -> Gaussian:
        """The policy in contexts (B, c): means (B, d), and factors (B, d, d), or (d, d) if shared."""
        parameters = self.factor_parameters
        if self.factor_offset is not None:
            offset = self.factor_offset(contexts).unflatten(-1, (self.num_weights, self.num_weights))
            parameters = parameters + offset
        return Gaussian(self.mean(contexts), factor_from(parameters))

    def write_back(self, projected: Gaussian) -> None:
        """Sets a shared covariance to its projection; a covariance that depends on the context is only pulled."""
        if self.factor_offset is None:
            write_back(self.factor_parameters, projected)


def network(inputs: int, outputs: int, hidden: int, last_layer: float = 1.0) -> nn.Sequential:
    """Two hidden layers with tanh, in float64; the weights of the last layer are scaled by `last_layer`."""
    last = nn.Linear(hidden, outputs)
    with torch.no_grad():
        last.weight.mul_(last_layer)
        last.bias.zero_()
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), last).double()


def sample(policy: Gaussian, generator: torch.Generator | None = None) -> Tensor:
    """Draws weights, one vector for each context, (..., d), without gradient."""
    with torch.no_grad():
        noise = torch.randn(policy.mean.shape, generator=generator, dtype=policy.mean.dtype)
        return policy.mean + (policy.factor @ noise.unsqueeze(-1)).squeeze(-1)


def segment_log_prob(policy: Gaussian, primitive: ProDMP, weights: Tensor, cuts: Tensor, noise: float = 1e-5) -> Tensor:
    """The log-density of each segment of a movement: that of the positions of all joints at the segment's two ends.

    These positions have the density `N(H_k μ, H_k Σ H_kᵀ + ρI)`, where `H_k` is the basis at both ends. The terms of
    the initial position and velocity cancel, so only the weights are needed.

    Args:
        policy: The policy of B episodes, over d = D (n + 1) weights of D joints.
        primitive: The tables of the movement.
        weights: The weights of the movements that were made, (B, d).
        cuts: The ends of K segments as indices into the time points, (K + 1,) int64, ascending.
        noise: ρ, the variance of a position about the movement, which keeps the density finite: at the start, where all
            movements have the same position, it is the only variance.

    Returns:
        (B, K), in nats, differentiable in the policy.
    """
    columns = primitive.num_bases + 1
    ends = torch.stack([cuts[:-1], cuts[1:]], -1)
    basis = primitive.position_basis[ends]  # (K, 2, n + 1)

    def at_ends(vectors: Tensor) -> Tensor:
        """`H_k v`, (..., K, 2D), of vectors (..., d)."""
        by_joint = vectors.unflatten(-1, (-1, columns))
        return torch.einsum("ken,...jn->...kej", basis, by_joint).flatten(-2)

    root = at_ends(policy.factor.mT).movedim(-3, -1)  # H_k L, (..., K, 2D, d)
    covariance = root @ root.mT + noise * torch.eye(root.shape[-2], dtype=root.dtype)
    return _log_density(at_ends(weights - policy.mean), torch.linalg.cholesky(covariance))


def _log_density(deviation: Tensor, factor: Tensor) -> Tensor:
    """`log N(deviation; 0, factor factorᵀ)`, (B, K), from (B, K, m) and (K, m, m) or (B, K, m, m)."""
    if factor.dim() == 3:  # one covariance for all episodes: solve for all of them at once
        white = torch.linalg.solve_triangular(factor, deviation.movedim(0, -1), upper=False).movedim(-1, 0)
    else:
        white = torch.linalg.solve_triangular(factor, deviation.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - log_det - 0.5 * deviation.shape[-1] * math.log(2 * math.pi)
