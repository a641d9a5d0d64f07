"""One update: what learns, what stays in the trust region, and units of the critic."""

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("mujoco")

from troll.gaussian import kl_parts
from troll_lab.episodic import ProDMP, sample
from troll_lab.episodic.config import EpisodicConfig
from troll_lab.episodic.learner import Critic, Learner, descend
from troll_lab.episodic.rollout import Rollout

STEPS, OBSERVED, JOINTS = 20, 4, 2
PRIMITIVE = ProDMP(num_bases=2, num_steps=STEPS, time_step=0.05)
QUICK: dict[str, Any] = {"num_bases": 2, "segment_points": 5, "hidden": 16, "initial_scale": 0.5, "learning_rate": 3e-3}


def learner_of(**settings: Any) -> Learner:
    return Learner(EpisodicConfig(**{**QUICK, **settings}), PRIMITIVE, OBSERVED, JOINTS)


def episodes(learner: Learner, seed: int) -> Rollout:
    """Of an environment without dynamics: joints are where the movement wants them, and should be at the context."""
    generator = torch.Generator().manual_seed(seed)
    context = torch.rand(64, JOINTS, generator=generator, dtype=torch.float64)
    start = torch.zeros_like(context)
    weights = sample(learner.policy(torch.cat([start, context], -1)), generator)
    joints, _ = PRIMITIVE.trajectory(weights, start, start)
    observations = torch.cat([joints, context.unsqueeze(1).expand_as(joints)], -1)
    rewards = -(joints - context.unsqueeze(1)).norm(dim=-1)[:, 1:]
    return Rollout(observations, rewards, weights, rewards[:, -1] > -0.1)


@pytest.mark.parametrize(("events", "constraint"), [("segments", "trust_region"), ("episodes", "clip")])
def test_learner_improves_by_every_method(events: str, constraint: str) -> None:
    learner = learner_of(
        events=events, constraint=constraint, covariance_bound=0.01, mean_bound=0.2, learning_rate=1e-2
    )
    generator = torch.Generator().manual_seed(0)
    returns = []
    for iteration in range(8):
        rollout = episodes(learner, iteration)
        returns.append(rollout.rewards.sum(-1).mean().item())
        metrics = learner.update(rollout, generator)
    assert sum(returns[-3:]) > 0.8 * sum(returns[:3])  # returns are negative
    assert ("projected_fraction" in metrics) == (constraint == "trust_region")


def test_update_keeps_a_shared_covariance_within_its_bound() -> None:
    learner = learner_of(learning_rate=0.03)
    rollout = episodes(learner, 0)
    with torch.no_grad():
        old = learner.policy(rollout.contexts)
    metrics = learner.update(rollout, torch.Generator().manual_seed(0))
    _, covariance = kl_parts(learner.policy(rollout.contexts), old)
    assert covariance.item() == pytest.approx(5e-4, rel=1e-6)
    assert metrics["covariance_kl"] == covariance.item()
    assert metrics["mean_kl"] > 0


def test_update_moves_a_contextual_covariance_by_the_pull() -> None:
    moved = []
    for pull_weight in (1.0, 0.0):
        learner = learner_of(contextual_covariance=True, pull_weight=pull_weight)
        rollout = episodes(learner, 0)
        with torch.no_grad():
            old = learner.policy(rollout.contexts)
        learner.update(rollout, torch.Generator().manual_seed(0))
        _, covariance = kl_parts(learner.policy(rollout.contexts), old)
        assert covariance.shape == (64,)
        moved.append(covariance.mean().item())
    assert 0 < 5 * moved[0] < moved[1]


def test_restored_learner_goes_on_exactly() -> None:
    learner, other = learner_of(), learner_of(seed=5)
    learner.update(episodes(learner, 0), torch.Generator().manual_seed(0))
    other.restore(deepcopy(learner.state()))
    rollout = episodes(learner, 1)
    expected = learner.update(rollout, torch.Generator().manual_seed(1))
    assert other.update(rollout, torch.Generator().manual_seed(1)) == expected


def test_critic_learns_returns_of_any_size() -> None:
    errors = []
    for size in (1.0, 1e4):
        learner = learner_of(critic_learning_rate=3e-3, critic_updates=50)
        rollout = episodes(learner, 0)
        scaled = Rollout(rollout.observations, size * rollout.rewards, rollout.weights, rollout.success)
        errors.append(learner.update(scaled, torch.Generator().manual_seed(0))["value_loss"])
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    assert errors[0] < 0.5


def test_critic_knows_that_an_episode_ends() -> None:
    critic = Critic(OBSERVED, hidden=8)
    critic.set_units(torch.ones(3, STEPS, dtype=torch.float64))
    values = critic(torch.randn(3, STEPS + 1, OBSERVED, dtype=torch.float64))
    assert values.shape == (3, STEPS + 1)
    assert not values[:, -1].any()
    assert values[:, 0].mean().item() == pytest.approx((STEPS + 1) / 2, rel=0.1)


def test_long_gradients_are_shortened() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    descend(optimizer, 50 * weight.square().sum(), max_grad_norm=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([2.4, 3.2]))
    descend(optimizer, 0.05 * weight.square().sum(), max_grad_norm=1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([2.16, 2.88]))


def test_update_stops_on_a_loss_that_is_not_finite() -> None:
    learner = learner_of()
    rollout = episodes(learner, 0)
    rollout.rewards[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss became nan"):
        learner.update(rollout, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("learning_rate", [30.0, 1e3])
def test_update_stops_on_a_policy_that_diverges(learning_rate: float) -> None:
    """The first is so far away that it cannot be projected, of the second a standard deviation becomes 0."""
    learner = learner_of(learning_rate=learning_rate)
    with pytest.raises(FloatingPointError, match="the policy diverged, lower the learning rate or the bounds"):
        for seed in range(4):
            learner.update(episodes(learner, seed), torch.Generator().manual_seed(0))
