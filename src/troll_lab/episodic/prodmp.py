r"""Probabilistic dynamic movement primitives: trajectories that start at the robot and are linear in their weights.

A dynamic movement primitive (arXiv 2210.01531) is a damped spring with the rest position g, its goal, and a driving
force,

    τ²ÿ  =  α(β(g − y) − τẏ) + x(t) φ(x)ᵀw,     x(t) = e^{−α_x t/τ},     β = α/4 .

It is critically damped, so variation of constants solves it. With `a = α/2τ`, `y₁ = e^{−at}`, `y₂ = t e^{−at}`,

    y(t)  =  c₁y₁ + c₂y₂  +  [y₂p₂ − y₁p₁, y₂q₂ − y₁q₁]·[w; g] ,

where c₁ and c₂ follow from position and velocity at the start, and p and q are integrals over `e^{au}`, which grow
without bound. Their differences do not: they are convolutions with the spring's response `k(s) = s e^{−as}`,

    y₂p₂ − y₁p₁  =  τ⁻² ∫₀ᵗ k(t − u) xφ du,     y₂q₂ − y₁q₁  =  a² ∫₀ᵗ k(s) ds  =  1 − (1 + at) e^{−at} ,

and are computed in this form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Gauss-Legendre nodes between two time points: exact to rounding unless bases are narrower than a time step.
_NODES = 16


class ProDMP:
    r"""Movement primitives of one duration, `y = y_init + H(t) w`, on a grid of `num_steps + 1` time points from 0.

    The bases are `φ_i ∝ exp(−(x − c_i)²/2σ_i²)`, which sum to 1. Their centres are the phases `c_i = x(t_i)` of equally
    spaced times from 0 to the duration, and σ_i is the distance to the next centre, which for the last one is beyond
    the end. They are those of mp-pytorch with a `basis_bandwidth_factor` of 1.

    The weights of a joint are those of its bases, followed by the goal, relative to the start: with zero weights a
    joint at rest stays at rest. A weight of 1 moves the joint by at most 1: the equation's weights are
    `w = weight_scale * weights`.

    Everything is float64.

    Args:
        num_bases: n, the number of bases of each joint.
        num_steps: T, the number of time steps of a trajectory.
        time_step: Seconds from one time point to the next.
        alpha: α > 0, the stiffness: the spring has come to rest after about `12 / α` of the duration.
        alpha_phase: α_x > 0, the rate at which the phase falls from 1 to `e^{−α_x}`.

    Attributes:
        times: Seconds since the start, (T + 1,) for T steps.
        position_basis: H(t), (T + 1, n + 1) for n bases.
        velocity_basis: dH/dt, (T + 1, n + 1).
        weight_scale: (n + 1,), the factors from weights to those of the equation.

    Raises:
        ValueError: If an argument is not above 0.
    """

    def __init__(
        self, num_bases: int, num_steps: int, time_step: float, alpha: float = 25.0, alpha_phase: float = 3.0
    ) -> None:
        for name, value in (
            ("num_bases", num_bases),
            ("num_steps", num_steps),
            ("time_step", time_step),
            ("alpha", alpha),
            ("alpha_phase", alpha_phase),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        self.num_bases, self.num_steps, self.time_step = num_bases, num_steps, time_step
        self.tau, self.alpha, self.alpha_phase = num_steps * time_step, alpha, alpha_phase
        self.times = time_step * torch.arange(num_steps + 1, dtype=torch.float64)

        nodes, weights = self._quadrature()
        since = (self.times.unsqueeze(-1) - nodes).clamp(min=0)  # (T + 1, nodes)
        decay = torch.where(nodes < self.times.unsqueeze(-1), weights * torch.exp(-self._rate * since), 0.0)
        push = self.forcing(nodes) / self.tau**2
        position, velocity = (since * decay) @ push, ((1 - self._rate * since) * decay) @ push

        rest = torch.exp(-self._rate * self.times)
        goal = 1 - (1 + self._rate * self.times) * rest
        goal_velocity = self._rate**2 * self.times * rest
        largest = position.abs().amax(0)
        self.weight_scale = torch.cat([1 / largest, torch.ones(1, dtype=torch.float64)])
        self.position_basis = torch.cat([position / largest, goal.unsqueeze(-1)], -1)
        self.velocity_basis = torch.cat([velocity / largest, goal_velocity.unsqueeze(-1)], -1)

    @property
    def _rate(self) -> float:
        return self.alpha / (2 * self.tau)

    def forcing(self, times: Tensor) -> Tensor:
        """`x φ(x)`, (..., n), at times (...) in seconds."""
        phase = torch.exp(-self.alpha_phase * times / self.tau).unsqueeze(-1)
        steps = torch.arange(self.num_bases + 1, dtype=torch.float64) / max(self.num_bases - 1, 1)
        centres = torch.exp(-self.alpha_phase * steps)
        return phase * torch.softmax(-0.5 * ((phase - centres[:-1]) / centres.diff()).square(), -1)

    def initial(self, position: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """The trajectory of zero weights, which only brings the initial velocity to rest.

        Args:
            position: Positions of D joints at the start, (..., D).
            velocity: Velocities of the joints at the start, (..., D), per second.

        Returns:
            `y_init`, (..., T + 1, D), and its velocity.
        """
        rest = torch.exp(-self._rate * self.times).unsqueeze(-1)
        time = self.times.unsqueeze(-1)
        position, velocity = position.unsqueeze(-2), velocity.unsqueeze(-2)
        return position + velocity * time * rest, velocity * (1 - self._rate * time) * rest

    def trajectory(self, weights: Tensor, position: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """The trajectory of D joints at every time point; differentiable.

        Args:
            weights: The weights, (..., D (n + 1)), joint by joint.
            position: Positions at the start, (..., D).
            velocity: Velocities at the start, (..., D), per second.

        Returns:
            Positions, (..., T + 1, D), and velocities, per second.
        """
        by_joint = weights.unflatten(-1, (position.shape[-1], self.num_bases + 1)).mT
        start, start_velocity = self.initial(position, velocity)
        return start + self.position_basis @ by_joint, start_velocity + self.velocity_basis @ by_joint

    def _quadrature(self) -> tuple[Tensor, Tensor]:
        """Nodes and weights of Gauss-Legendre quadrature in each time step, (T · nodes,)."""
        from numpy.polynomial.legendre import leggauss  # here, since importing the package must need torch only

        values, weights = map(torch.from_numpy, leggauss(_NODES))  # for the interval from -1 to 1
        nodes = self.times[:-1].unsqueeze(-1) + 0.5 * self.time_step * (1 + values)
        return nodes.flatten(), (0.5 * self.time_step * weights).expand_as(nodes).flatten()
