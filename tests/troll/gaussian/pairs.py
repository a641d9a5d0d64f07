"""Pairs of Gaussians, every projection under one signature, and distances in extended precision to judge them by."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian, GaussianProjection

Array = NDArray[Any]
AnyPolicy = Any  # Gaussian or DiagonalGaussian

#: Both bounds, for the projections with two; the joint one has the first.
PROJECTIONS: dict[str, Callable[[AnyPolicy, AnyPolicy, Any, Any], GaussianProjection[Any]]] = {
    "kl": gaussian.project_kl,
    "joint": lambda new, old, bound, _: gaussian.project_joint_kl(new, old, bound),
    "frobenius": gaussian.project_frobenius,
    "wasserstein": gaussian.project_wasserstein,
}

#: How the new policy differs from the old one: scale of the change, and condition numbers of the covariances.
FAMILIES = {
    "near": (0.1, 10.0, 10.0),
    "far": (30.0, 1e3, 1e3),
    "very far": (1e4, 1e3, 1e3),
    "old nearly singular": (1.0, 10.0, 1e10),
    "new nearly singular": (1.0, 1e10, 10.0),
    "both nearly singular": (1.0, 1e10, 1e10),
}


def factor(rng: np.random.Generator, d: int, condition: float, scale: float = 1.0) -> Array:
    """The Cholesky factor of a covariance with eigenvalues from scale² down to scale²/condition."""
    rotation, _ = np.linalg.qr(rng.standard_normal((d, d)))
    root = rotation * scale * np.logspace(0, -0.5 * np.log10(condition), d)
    upper = np.linalg.qr(root.T)[1]
    return (upper * np.where(np.diag(upper) < 0, -1, 1)[:, None]).T


def pair(family: str, d: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Gaussian, Gaussian]:
    """A new and an old policy of one state."""
    rng = np.random.default_rng([d, seed])
    size, new_condition, old_condition = FAMILIES[family]
    old_factor = factor(rng, d, old_condition)
    if family == "near":
        change = np.tril(rng.standard_normal((d, d)) * size / np.sqrt(d))
        new_factor = old_factor @ (np.eye(d) + change * np.where(np.eye(d) > 0, 0.5, 1.0))
    else:
        new_factor = factor(rng, d, new_condition, scale=float(np.exp(np.log(size) * rng.uniform(-1, 1))))
    old_mean = rng.standard_normal(d)
    new_mean = old_mean + size * old_factor @ rng.standard_normal(d)
    made = (torch.as_tensor(x).to(dtype) for x in (new_mean, new_factor, old_mean, old_factor))
    new_mean_, new_factor_, old_mean_, old_factor_ = made
    return Gaussian(new_mean_, new_factor_), Gaussian(old_mean_, old_factor_)


def policies(kind: type, shape: tuple[int, ...], d: int, seed: int = 0) -> tuple[AnyPolicy, AnyPolicy]:
    """A new and an old policy with states of any shape, some way apart."""
    generator = torch.Generator().manual_seed(seed)

    def made() -> AnyPolicy:
        mean, logs = (torch.randn(*shape, d, generator=generator, dtype=torch.float64) for _ in range(2))
        scale = torch.exp(0.3 * logs)
        if kind is DiagonalGaussian:
            return DiagonalGaussian(mean, scale)
        below = torch.randn(*shape, d, d, generator=generator, dtype=torch.float64).tril(-1)
        return Gaussian(mean, below + torch.diag_embed(scale))

    return made(), made()


def spread(policy: AnyPolicy) -> Tensor:
    return policy.factor if isinstance(policy, Gaussian) else policy.scale


def detached(policy: AnyPolicy) -> AnyPolicy:
    return type(policy)(policy.mean.detach(), spread(policy).detach())


def with_gradient(policy: AnyPolicy) -> AnyPolicy:
    return type(policy)(*(x.detach().clone().requires_grad_() for x in (policy.mean, spread(policy))))


def covariance(policy: AnyPolicy) -> Tensor:
    root = policy.factor if isinstance(policy, Gaussian) else torch.diag_embed(policy.scale)
    return root @ root.mT


def triangle(kind: type, d: int) -> Tensor:
    """Ones where the factor, or the scale, has parameters."""
    ones = torch.ones(d, d, dtype=torch.float64).tril()
    return ones if kind is Gaussian else ones.diagonal()


def mixture(new: AnyPolicy, old: AnyPolicy, tau: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the normalised p^(1 − τ) p̃^τ; τ is a number or (..., 1, 1)."""
    inverse, old_inverse = covariance(new).inverse(), covariance(old).inverse()
    precision = (1 - tau) * old_inverse + tau * inverse
    natural = (1 - tau) * old_inverse @ old.mean.unsqueeze(-1) + tau * inverse @ new.mean.unsqueeze(-1)
    return torch.linalg.solve(precision, natural).squeeze(-1), precision.inverse()


def diagonal_as_full(policy: DiagonalGaussian) -> Gaussian:
    return Gaussian(policy.mean, torch.diag_embed(policy.scale))


def exact_distances(name: str, new: Gaussian, old: Gaussian) -> tuple[float, float]:
    """The distances of mean and covariance of one state, computed in extended precision.

    The Wasserstein distance is in double precision, from the eigenvalues of `L₀ᵀ Σ L₀`.
    """
    mean, root, old_mean, old_root = (
        x.detach().double().numpy().astype(np.longdouble) for x in (new.mean, new.factor, old.mean, old.factor)
    )
    delta = mean - old_mean
    if name in ("kl", "joint"):
        ratio = _solved(old_root, root)
        diagonal = np.diag(ratio)
        below = ratio - np.diag(diagonal)
        covariance = 0.5 * (below**2).sum() + 0.5 * (diagonal**2 - 1 - 2 * np.log(diagonal)).sum()
        return float(0.5 * (_solved(old_root, delta[:, None]) ** 2).sum()), float(covariance)
    if name == "frobenius":
        return float((delta**2).sum()), float(((root @ root.T - old_root @ old_root.T) ** 2).sum())
    nuclear = np.linalg.svd((old_root.T @ root).astype(float), compute_uv=False).sum()
    return float((delta**2).sum()), float((root**2).sum() + (old_root**2).sum() - 2 * nuclear)


def nearest_covariance(
    distance: Callable[[Array], float], room: Callable[[Array], float], start: Array, ftol: float
) -> tuple[Array, float]:
    """The covariance of least distance with `room >= 0`, and that distance, by SLSQP over its factor, from `start`."""
    rows = np.tril_indices(len(start))

    def sigma(x: Array) -> Array:
        root = np.zeros_like(start)
        root[rows] = x
        return root @ root.T

    solved = minimize(
        lambda x: distance(sigma(x)),
        start[rows],
        constraints=[{"type": "ineq", "fun": lambda x: room(sigma(x))}],
        method="SLSQP",
        options={"maxiter": 500, "ftol": ftol},
    )
    assert solved.success, solved.message
    return sigma(solved.x), float(solved.fun)


def _solved(lower: Array, right: Array) -> Array:
    """`lower⁻¹ right`, by forward substitution."""
    found = np.zeros_like(right)
    for i in range(len(lower)):
        found[i] = (right[i] - lower[i, :i] @ found[:i]) / lower[i, i]
    return found
