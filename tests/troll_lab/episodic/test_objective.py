"""The loss of a batch against its closed forms: values at the old policy, gradients, and what each method bounds."""

import pytest
import torch

from troll.gaussian import Gaussian, factor_from, kl_parts
from troll_lab.episodic import ProDMP, clip_loss, ratio_loss, sample, segment_log_prob, trust_region_objective

PRIMITIVE = ProDMP(num_bases=2, num_steps=20, time_step=0.05)
CUTS = torch.tensor([0, 4, 9, 20])
EPISODES, WEIGHTS = 64, 6


def batch() -> tuple[Gaussian, torch.Tensor, torch.Tensor]:
    """An old policy, movements it made, and advantages of their segments."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(EPISODES, WEIGHTS, generator=generator, dtype=torch.float64)
    factor = factor_from(0.3 * torch.randn(WEIGHTS, WEIGHTS, generator=generator, dtype=torch.float64))
    old = Gaussian(mean, factor)
    advantages = torch.randn(EPISODES, len(CUTS) - 1, generator=generator, dtype=torch.float64)
    return old, sample(old, generator), advantages


def moved(old: Gaussian, distance: float) -> Gaussian:
    return Gaussian(old.mean + distance, old.factor * (1 + distance))


def test_ratio_loss_at_the_old_policy_is_the_policy_gradient() -> None:
    old, weights, advantages = batch()
    mean = old.mean.clone().requires_grad_()
    density = segment_log_prob(Gaussian(mean, old.factor), PRIMITIVE, weights, CUTS)
    loss = ratio_loss(density - density.detach(), advantages)
    assert loss.item() == pytest.approx(-advantages.mean().item())
    (found,) = torch.autograd.grad(loss, mean, retain_graph=True)
    (expected,) = torch.autograd.grad(-(density * advantages).mean(), mean)
    torch.testing.assert_close(found, expected)


def test_clip_loss_drops_gradients_of_what_has_gone_far() -> None:
    log_ratio = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss = clip_loss(log_ratio, advantages, clip=0.2)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.2) / 5)
    (slope,) = torch.autograd.grad(loss, log_ratio)
    torch.testing.assert_close(slope, torch.tensor([0, 1.5, -0.5, 0, -2.2]) / 5)


@pytest.mark.parametrize("events", ["segments", "episodes"])
def test_trust_region_objective_holds_its_bounds_and_pulls(events: str) -> None:
    old, weights, advantages = batch()

    def log_prob(policy: Gaussian) -> torch.Tensor:
        if events == "episodes":
            return policy.distribution().log_prob(weights)
        return segment_log_prob(policy, PRIMITIVE, weights, CUTS)

    if events == "episodes":
        advantages = advantages.sum(-1)
    new = moved(old, 0.4)
    loss, projection = trust_region_objective(new, old, log_prob, log_prob(old), advantages, 0.05, 5e-4)
    mean, covariance = kl_parts(projection.policy, old)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.05), rtol=1e-9, atol=0)
    assert covariance.item() == pytest.approx(5e-4, rel=1e-9)
    without, _ = trust_region_objective(new, old, log_prob, log_prob(old), advantages, 0.05, 5e-4, pull_weight=0)
    ratio = torch.exp(log_prob(projection.policy) - log_prob(old))
    assert without.item() == pytest.approx(-(ratio * advantages).mean().item())
    mean, covariance = kl_parts(new, projection.policy)
    assert (loss - without).item() == pytest.approx((mean.mean() + covariance).item())


def test_trust_region_objective_inside_its_bounds_is_the_ratio() -> None:
    old, weights, advantages = batch()
    new = moved(old, 1e-3)

    def log_prob(policy: Gaussian) -> torch.Tensor:
        return segment_log_prob(policy, PRIMITIVE, weights, CUTS)

    loss, projection = trust_region_objective(new, old, log_prob, log_prob(old), advantages, 0.5, 0.5)
    assert not projection.mean_projected.any() and not projection.covariance_projected.any()
    assert loss == ratio_loss(log_prob(new) - log_prob(old), advantages)
