"""The bound on entropy."""

import math

import pytest
import torch
from torch.distributions import Normal

from tests.troll.gaussian.pairs import policies, spread, triangle, with_gradient
from troll import gaussian
from troll.gaussian import DiagonalGaussian, Gaussian

every_kind = pytest.mark.parametrize("kind", [Gaussian, DiagonalGaussian])


@every_kind
def test_project_entropy_raises_to_minimum_only(kind: type) -> None:
    policy = with_gradient(policies(kind, (8,), 3)[0])
    minimum = policy.entropy.detach().median().item()
    raised = gaussian.project_entropy(policy, minimum)
    torch.testing.assert_close(raised.entropy, policy.entropy.clamp(min=minimum))
    above = policy.entropy >= minimum
    assert torch.equal(spread(raised)[above], spread(policy)[above]) and above.any() and not above.all()
    assert raised.mean is policy.mean
    (grad,) = torch.autograd.grad(spread(raised).sum(), spread(policy))
    assert torch.equal(grad[above], torch.ones_like(grad[above]))


@every_kind
def test_project_entropy_gradient_by_differences(kind: type) -> None:
    policy = with_gradient(policies(kind, (2,), 3)[0])

    def raised(root: torch.Tensor) -> torch.Tensor:
        return spread(gaussian.project_entropy(kind(policy.mean, root * triangle(kind, 3)), 10.0))

    assert torch.autograd.gradcheck(raised, spread(policy))


@every_kind
def test_project_entropy_is_nearest_policy(kind: type) -> None:
    policy = policies(kind, (), 3)[0]
    raised = gaussian.project_entropy(policy, policy.entropy.item() + 0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        noise = 0.1 * torch.randn(spread(policy).shape, generator=generator, dtype=torch.float64)
        nudged = kind(policy.mean, spread(raised) + (noise.tril() if kind is Gaussian else noise))
        nudged = kind(policy.mean, spread(nudged) * torch.exp((raised.entropy - nudged.entropy) / 3))
        assert gaussian.kl(nudged, policy) >= gaussian.kl(raised, policy)


def test_entropy_of_scale_is_that_of_independent_actions() -> None:
    expected = 4 * Normal(0.0, torch.tensor(0.3)).entropy().item()
    assert gaussian.entropy_of_scale(0.3, 4) == pytest.approx(expected)
    assert gaussian.entropy_of_scale(0.3, 1) == pytest.approx(expected / 4)


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.05])
def test_entropy_of_scale_is_the_least_scale(scale: float) -> None:
    """Also where its entropy is negative."""
    policy = DiagonalGaussian(torch.zeros(6, 2), torch.full((2,), 0.01))
    raised = gaussian.project_entropy(policy, gaussian.entropy_of_scale(scale, 2))
    assert raised.scale.tolist() == pytest.approx([scale] * 2, rel=1e-6)


def test_project_entropy_refuses_bad_arguments() -> None:
    policy = policies(Gaussian, (3,), 2)[0]
    with pytest.raises(ValueError, match="minimum must be finite, got nan"):
        gaussian.project_entropy(policy, math.nan)
    with pytest.raises(ValueError, match=r"minimum must broadcast to \(3\), got \(2\)"):
        gaussian.project_entropy(policy, torch.zeros(2))
    with pytest.raises(ValueError, match="scale must be above 0 and finite, got 0"):
        gaussian.entropy_of_scale(0.0, 2)
    with pytest.raises(ValueError, match="dimension must be at least 1, got 0"):
        gaussian.entropy_of_scale(1.0, 0)
