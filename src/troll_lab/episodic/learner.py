"""Updates, from rollouts, of the policy that chooses movements and of the critic that judges single steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from troll.gaussian import Gaussian, kl_parts, project_kl
from troll_lab.episodic.config import EpisodicConfig
from troll_lab.episodic.objective import clip_loss, trust_region_objective
from troll_lab.episodic.policy import MovementPolicy, network, segment_log_prob
from troll_lab.episodic.prodmp import ProDMP
from troll_lab.episodic.rollout import Rollout
from troll_lab.episodic.segments import generalised_advantages, normalised, random_cuts, segment_advantages

#: The end of an error about an update that went wrong.
_REMEDY = "lower the learning rate or the bounds"


class Critic(nn.Module):
    """A network for the value of an observation at a remaining time of the episode; 0 after the last step.

    Values are in units of the first rollout's returns, so that one learning rate serves rewards of any size.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, observed: int, hidden: int) -> None:
        super().__init__()
        self.network = network(observed + 1, 1, hidden, last_layer=0.01)
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))

    def set_units(self, rewards: Tensor) -> None:
        """Fixes the units at the first call: the mean and the spread of the rewards-to-go of these (B, T) rewards."""
        if self.scale == 0:
            left = rewards.flip(-1).cumsum(-1)
            self.offset.copy_(left.mean())
            self.scale.copy_(left.std().clamp(min=1e-6))

    def forward(self, observations: Tensor) -> Tensor:
        """Values (B, T + 1) of observations (B, T + 1, o) from the start to the end of episodes."""
        left = torch.linspace(1, 0, observations.shape[1], dtype=observations.dtype)
        inputs = torch.cat([observations, left.expand(len(observations), -1).unsqueeze(-1)], -1)
        values = self.offset + self.scale * self.network(inputs).squeeze(-1)
        return torch.where(left > 0, values, 0.0)


class Learner:
    """The networks with their optimisers, and one update of both with a rollout.

    Args:
        config: The run's settings.
        primitive: The tables of the movements.
        observed: Size of an observation.
        joints: Number of joints that a movement moves.
    """

    def __init__(self, config: EpisodicConfig, primitive: ProDMP, observed: int, joints: int) -> None:
        torch.manual_seed(config.seed)
        self.config, self.primitive = config, primitive
        self.policy = MovementPolicy(
            observed,
            joints * (primitive.num_bases + 1),
            config.hidden,
            config.initial_scale,
            config.contextual_covariance,
        )
        self.critic = Critic(observed, config.hidden)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), config.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.critic_learning_rate)

    def update(self, rollout: Rollout, generator: torch.Generator) -> dict[str, float]:
        """Updates policy and critic with a rollout of the current policy.

        Args:
            rollout: B episodes.
            generator: The random numbers for the phase of the cuts.

        Returns:
            Metrics by name.

        Raises:
            FloatingPointError: If a loss becomes NaN or infinite, or the policy no longer is a distribution.
        """
        self.critic.set_units(rollout.rewards)
        with torch.no_grad():
            values = self.critic(rollout.observations)
        try:
            metrics = self._update_policy(rollout, values, generator)
        except (ValueError, torch.linalg.LinAlgError) as error:
            raise FloatingPointError(f"the policy diverged, {_REMEDY} ({error})") from error
        return metrics | self._update_critic(rollout, values)

    def _update_policy(self, rollout: Rollout, values: Tensor, generator: torch.Generator) -> dict[str, float]:
        config = self.config
        whole = torch.tensor([0, rollout.rewards.shape[1]])
        segments = config.events == "segments"
        cuts = random_cuts(int(whole[1]), config.segment_points, generator) if segments else whole
        advantages = segment_advantages(rollout.rewards, values, cuts, config.discount)
        advantages = normalised(advantages if segments else advantages.squeeze(-1))

        def log_prob(policy: Gaussian) -> Tensor:
            if segments:
                return segment_log_prob(policy, self.primitive, rollout.weights, cuts, config.likelihood_noise)
            return policy.distribution().log_prob(rollout.weights)

        with torch.no_grad():
            old = self.policy(rollout.contexts)
            old_log_prob = log_prob(old)
        projected = []
        for _ in range(config.updates):
            new = self.policy(rollout.contexts)
            if config.constraint == "clip":
                loss = clip_loss(log_prob(new) - old_log_prob, advantages, config.clip)
            else:
                loss, projection = trust_region_objective(
                    new,
                    old,
                    log_prob,
                    old_log_prob,
                    advantages,
                    config.mean_bound,
                    config.covariance_bound,
                    config.pull_weight,
                )
                projected.append(projection.mean_projected.double().mean().item())
            descend(self.optimizer, loss, config.max_grad_norm)
        with torch.no_grad():
            new = self.policy(rollout.contexts)
            if config.constraint == "trust_region":
                self.policy.write_back(project_kl(new, old, config.mean_bound, config.covariance_bound).policy)
                new = self.policy(rollout.contexts)
            mean_kl, covariance_kl = kl_parts(new, old)
        metrics = {
            "policy_loss": loss.item(),
            "mean_kl": mean_kl.mean().item(),
            "covariance_kl": covariance_kl.mean().item(),
            "entropy": new.entropy.mean().item(),
        }
        if projected:
            metrics["projected_fraction"] = sum(projected) / len(projected)
        return metrics

    def _update_critic(self, rollout: Rollout, values: Tensor) -> dict[str, float]:
        targets = values[:, :-1] + generalised_advantages(
            rollout.rewards, values, self.config.discount, self.config.gae_decay
        )
        for _ in range(self.config.critic_updates):
            error = (self.critic(rollout.observations)[:, :-1] - targets) / self.critic.scale
            loss = error.square().mean()
            descend(self.critic_optimizer, loss, self.config.max_grad_norm)
        explained = 1 - (targets - values[:, :-1]).var() / targets.var().clamp(min=1e-12)
        return {"value_loss": loss.item(), "explained_variance": explained.item()}

    def state(self) -> dict[str, Any]:
        """The state on which further updates depend, for `torch.save`."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a result of `state`."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "critic": self.critic,
            "optimizer": self.optimizer,
            "critic_optimizer": self.critic_optimizer,
        }


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, max_grad_norm: float) -> None:
    """Makes one step of the optimiser, with the gradient clipped to a norm.

    Raises:
        FloatingPointError: If the loss is NaN or infinite.
    """
    if not loss.isfinite():
        raise FloatingPointError(f"the loss became {loss.item()}: {_REMEDY}")
    optimizer.zero_grad()
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
