"""A trust region for continuous actions: PPO on gymnasium's Pendulum, with the clip and with a projection.

python examples/gaussian_policy.py                # two learning rates, five seeds: ten minutes on two cores
python examples/gaussian_policy.py --seeds 1 --iterations 2

Both methods have the same network, critic, advantages, optimiser and number of updates. They differ in `loss`, which
has the clip, or the ratio of the projected policy and the pull to it; with the projection, the projected covariance is
also written back after the updates on a rollout. The example needs `pip install ".[episodic]"`.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import gymnasium
import torch
from torch import Tensor, nn

from troll.gaussian import (
    DiagonalGaussian,
    GaussianProjection,
    kl,
    project_kl,
    scale_from,
    trust_region_loss,
    write_back,
)

ENVIRONMENTS, EPISODE = 16, 200
EPOCHS, MINIBATCHES = 10, 8
LEARNING_RATES = (1e-3, 3e-3)
DISCOUNT, GAE = 0.95, 0.95
CLIP = 0.2
MEAN_BOUND, COVARIANCE_BOUND, PULL = 0.05, 0.005, 1.0
METHODS = ("clip", "trust region")


class Actor(nn.Module):
    """A Gaussian whose mean depends on the state; its scale does not."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> DiagonalGaussian:
        """The policy at states (..., 3), with one scale for all."""
        return DiagonalGaussian(self.mean(states), scale_from(self.log_scale))


def project(new: DiagonalGaussian, old: DiagonalGaussian) -> GaussianProjection:
    """The policy within the trust region."""
    return project_kl(new, old, MEAN_BOUND, COVARIANCE_BOUND)


def loss(method: str, new: DiagonalGaussian, old: DiagonalGaussian, data: dict[str, Tensor]) -> Tensor:
    """The policy's loss on a minibatch: the only place where the methods differ."""
    if method == "clip":
        ratio = torch.exp(new.distribution().log_prob(data["actions"]) - data["log_probs"])
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratio * data["advantages"], clipped * data["advantages"]).mean()
    projection = project(new, old)
    ratio = torch.exp(projection.policy.distribution().log_prob(data["actions"]) - data["log_probs"])
    return (-ratio * data["advantages"] + PULL * trust_region_loss(new, projection)).mean()


@torch.no_grad()
def rollout(actor: Actor, critic: nn.Module, environment: gymnasium.vector.VectorEnv, seed: int) -> tuple[dict, float]:
    """One whole episode in each environment, with advantages; and the mean return."""
    states, actions, rewards = [], [], []
    observation, _ = environment.reset(seed=seed)
    for _ in range(EPISODE):
        states.append(torch.as_tensor(observation))
        actions.append(actor(states[-1]).distribution().sample())
        observation, reward, *_ = environment.step(2 * actions[-1].clamp(-1, 1).numpy())
        rewards.append(torch.as_tensor(reward, dtype=torch.float32))
    states.append(torch.as_tensor(observation))  # an episode ends by its length, so its last state has a value too

    values = critic(torch.stack(states)).squeeze(-1)
    advantages, following = torch.zeros(EPISODE, ENVIRONMENTS), torch.zeros(ENVIRONMENTS)
    for t in reversed(range(EPISODE)):
        error = rewards[t] / 10 + DISCOUNT * values[t + 1] - values[t]
        advantages[t] = following = error + DISCOUNT * GAE * following
    data = {"states": torch.stack(states[:-1]), "actions": torch.stack(actions), "targets": advantages + values[:-1]}
    data["advantages"] = (advantages - advantages.mean()) / advantages.std()
    data["log_probs"] = actor(data["states"]).distribution().log_prob(data["actions"])
    return {name: x.flatten(0, 1) for name, x in data.items()}, torch.stack(rewards).sum(0).mean().item()


def train(method: str, rate: float, seed: int, iterations: int) -> tuple[list[float], list[float]]:
    """The mean return of each rollout, and how far the policy was from the one before it: the mean KL, in nats."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    actor, critic = Actor(), nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=rate)
    environment = gymnasium.make_vec("Pendulum-v1", num_envs=ENVIRONMENTS, vectorization_mode="sync")
    returns, moved = [], []
    for iteration in range(iterations):
        data, achieved = rollout(actor, critic, environment, seed=1000 * seed + iteration)
        with torch.no_grad():
            old = actor(data["states"])
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(old.mean)).chunk(MINIBATCHES):
                batch = {name: x[rows] for name, x in data.items()}
                policy = loss(method, actor(batch["states"]), DiagonalGaussian(old.mean[rows], old.scale), batch)
                value = (critic(batch["states"]).squeeze(-1) - batch["targets"]).square().mean()
                optimizer.zero_grad()
                (policy + 0.5 * value).backward()
                optimizer.step()
        with torch.no_grad():
            if method == "trust region":
                write_back(actor.log_scale, project(actor(data["states"]), old).policy)
            moved.append(kl(actor(data["states"]), old).mean().item())
        returns.append(achieved)
    return returns, moved


def main() -> None:
    """Trains all, two at a time, and prints a line for each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40, help="rollouts of 3200 steps")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    settings = [(method, rate) for rate in LEARNING_RATES for method in METHODS]
    runs = [(*setting, seed) for seed in range(arguments.seeds) for setting in settings]
    results = {}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(train, *run, arguments.iterations) for run in runs]
        for (method, rate, seed), future in zip(runs, futures, strict=True):
            returns, moved = results[method, rate, seed] = future.result()
            shown = " ".join(f"{x:6.0f}" for x in returns[:: max(1, len(returns) // 6)])
            print(
                f"{method:>12}  rate {rate:.0e}  seed {seed}  returns {shown}  mean KL at most {max(moved):.3f}",
                flush=True,
            )
    print()
    for method, rate in settings:
        of = [results[method, rate, seed][0] for seed in range(arguments.seeds)]
        last = [statistics.fmean(returns[-10:]) for returns in of]
        whole = statistics.fmean(statistics.fmean(returns) for returns in of)
        each = " ".join(f"{x:.0f}" for x in sorted(last))
        print(
            f"{method:>12}  rate {rate:.0e}  last ten rollouts {statistics.fmean(last):5.0f} (seeds: {each})"
            f"  all rollouts {whole:5.0f}"
        )


if __name__ == "__main__":
    main()
