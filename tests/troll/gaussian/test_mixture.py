"""The KL projections: the primal problem by another solver, and the categorical projection on a grid of actions."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import troll
from benchmarks.gaussian import bound_errors
from tests.troll.gaussian.pairs import FAMILIES, covariance, mixture, pair, policies, with_gradient
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian


def minimised(new: Gaussian, old: Gaussian, kl_bound: float, covariance_only: bool) -> Gaussian:
    """`min_q KL(q ‖ new)` subject to `KL(q ‖ old) ≤ ε` by sequential quadratic programming over mean and factor."""
    d = old.mean.shape[-1]
    rows, columns = np.tril_indices(d)

    def policy(x: Tensor) -> Gaussian:
        below = torch.zeros(d, d, dtype=x.dtype).index_put((torch.as_tensor(rows), torch.as_tensor(columns)), x[d:])
        root = below.tril(-1) + torch.diag_embed(below.diagonal().exp())
        return Gaussian(old.mean if covariance_only else x[:d], root)

    def with_jacobian(other: Gaussian) -> tuple:
        def function(x: np.ndarray) -> tuple[float, np.ndarray]:
            leaf = torch.tensor(x, requires_grad=True)
            parts = gaussian.kl_parts(policy(leaf), other)
            value = parts[1] if covariance_only else parts[0] + parts[1]
            (grad,) = torch.autograd.grad(value, leaf)
            return value.item(), grad.numpy()

        return (lambda x: function(x)[0]), (lambda x: function(x)[1])

    objective, gradient = with_jacobian(new)
    divergence, slope = with_jacobian(old)
    raw = old.factor.tril(-1) + torch.diag_embed(old.factor.diagonal().log())
    start = np.concatenate([old.mean.numpy(), raw.numpy()[rows, columns]])
    constraint = {"type": "ineq", "fun": lambda x: kl_bound - divergence(x), "jac": lambda x: -slope(x)}
    found = minimize(
        objective,
        start,
        jac=gradient,
        constraints=[constraint],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    assert found.success, found.message
    return policy(torch.as_tensor(found.x))


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_joint_projection_solves_the_primal_problem(d: int, seed: int) -> None:
    new, old = policies(Gaussian, (), d, seed)
    found = gaussian.project_joint_kl(new, old, 0.1).policy
    expected = minimised(new, old, 0.1, covariance_only=False)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.factor, expected.factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_covariance_projection_solves_the_primal_problem(d: int, seed: int) -> None:
    new, old = policies(Gaussian, (), d, seed)
    found = gaussian.project_kl(new, old, 1.0, 0.05)
    assert found.covariance_projected
    expected = minimised(new, old, 0.05, covariance_only=True)
    torch.testing.assert_close(found.policy.factor, expected.factor, rtol=1e-5, atol=1e-5)


def test_mean_projection_is_the_nearest_in_the_old_metric() -> None:
    new, old = policies(Gaussian, (3,), 4)
    found = gaussian.project_kl(new, old, 0.05, torch.inf).policy.mean

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(old.factor, (a - b).unsqueeze(-1), upper=False).square().sum((-2, -1)) / 2

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        nudged = found + 0.05 * torch.randn(found.shape, generator=generator, dtype=torch.float64)
        nudged = old.mean + (nudged - old.mean) * torch.sqrt(0.05 / distance(nudged, old.mean)).clamp(max=1).unsqueeze(
            -1
        )
        assert (distance(nudged, new.mean) >= distance(found, new.mean) - 1e-12).all()


@pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])
def test_joint_projection_is_the_geometric_mixture(kind: type) -> None:
    new, old = policies(kind, (5,), 3)
    projection = gaussian.project_joint_kl(new, old, 0.05)
    tau = (1 / (1 + projection.mean_multiplier)).unsqueeze(-1).unsqueeze(-1)
    mean, sigma = mixture(new, old, tau)
    torch.testing.assert_close(covariance(projection.policy), sigma)
    torch.testing.assert_close(projection.policy.mean, mean)


@pytest.mark.parametrize(("mean", "scale"), [(0.8, 1.0), (0.0, 0.8), (-0.5, 1.3)])
def test_joint_projection_is_categorical_on_fine_grid(mean: float, scale: float) -> None:
    """The trapezoidal rule of smooth densities is exact to the last digits, so both problems are one."""
    actions = torch.linspace(-7, 7, 1000, dtype=torch.float64)

    def on_grid(policy: DiagonalGaussian) -> Tensor:
        return torch.log_softmax(policy.distribution().log_prob(actions.unsqueeze(-1)), -1)

    def one(mean: float, scale: float) -> DiagonalGaussian:
        return with_gradient(DiagonalGaussian(*(torch.tensor([x], dtype=torch.float64) for x in (mean, scale))))

    new, old = one(mean, scale), one(0.0, 1.0)
    found = gaussian.project_joint_kl(new, old, 0.02)
    expected = troll.project(on_grid(new), on_grid(old), 0.02)
    assert found.mean_projected and expected.projected
    assert found.mean_multiplier.item() == pytest.approx(expected.multiplier.item(), rel=1e-6)
    # The categorical projection floors probabilities at 1e-12, out in the tails.
    torch.testing.assert_close(on_grid(found.policy).exp(), expected.log_probs.exp(), rtol=0, atol=1e-9)
    weights = torch.sin(3 * actions)
    grads = [
        torch.autograd.grad((log_q.exp() * weights).sum(), (new.mean, new.scale))
        for log_q in (on_grid(found.policy), expected.log_probs)
    ]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["kl", "joint"])
@pytest.mark.parametrize("family", ["1e12", "1e18"])
def test_projection_meets_bound_of_disjoint_policies(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of variances beyond the digits of float64: τ is about as small, and the bound is met all the same."""
    monkeypatch.setitem(FAMILIES, "1e12", (1e3, 1e6, 1e6))
    monkeypatch.setitem(FAMILIES, "1e18", (1e6, 1e12, 1e12))
    for d in (1, 2, 8, 40):
        for bound in (1e-8, 0.0005, 10.0):
            mean_bound = bound if name == "joint" else torch.inf
            errors = bound_errors(name, *pair(family, d, 0), mean_bound, bound)
            assert all(error < 1e-9 for error in errors)


def test_gradient_of_projected_1d_covariance_is_zero() -> None:
    """Like a token with two outcomes: the surface of the ball is a single point."""
    new, old = (with_gradient(p) for p in policies(Gaussian, (4,), 1))
    projection = gaussian.project_kl(new, old, torch.inf, 1e-6)
    assert projection.covariance_projected.all()
    (grad,) = torch.autograd.grad(projection.policy.factor.sum(), new.factor)
    assert grad.abs().max() < 1e-12
