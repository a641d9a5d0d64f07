"""Whole episodes of many environments at once, each driven by one movement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import Tensor

from troll_lab.episodic.environments import Task
from troll_lab.episodic.environments.metaworld import HELD_OUT
from troll_lab.episodic.prodmp import ProDMP

Environments = SyncVectorEnv | AsyncVectorEnv


@dataclass(frozen=True, eq=False)
class Rollout:
    """B episodes of T steps, float64.

    Attributes:
        observations: The observations before each step and after the last one, (B, T + 1, o).
        rewards: The rewards of the steps, (B, T).
        weights: The weights of the movements, (B, d).
        success: Whether each episode is solved at its last step, (B,) bool.
    """

    observations: Tensor
    rewards: Tensor
    weights: Tensor
    success: Tensor

    @property
    def contexts(self) -> Tensor:
        """The first observations, (B, o), from which the policy chooses a movement."""
        return self.observations[:, 0]


def make_environments(task: Task, count: int, processes: bool) -> Environments:
    """A number of environments of a task, in this process or with a process for each.

    The communication with processes takes about as long as a step of the arm; they are faster only if a step takes
    milliseconds.
    """
    return (AsyncVectorEnv if processes else SyncVectorEnv)([task.make] * count)


def collect(
    task: Task,
    environments: Environments,
    primitive: ProDMP,
    choose: Callable[[Tensor], Tensor],
    seeds: Sequence[int],
    held_out: bool = False,
) -> Rollout:
    """Runs an episode for each seed, as many at once as there are environments.

    Args:
        task: The task of the environments.
        environments: The environments, from `make_environments`.
        primitive: The tables of the task's movements.
        choose: A function from contexts, (b, o), to the weights of movements, (b, d).
        seeds: The seeds of the episodes; their number must be a multiple of that of the environments.
        held_out: Whether an environment with a fixed number of tasks gives each episode a task of its own that training
            never draws. In others, where a seed draws from a continuum, it has no effect.

    Raises:
        ValueError: If the number of seeds is not such a multiple.
    """
    count = environments.num_envs
    if len(seeds) % count:
        raise ValueError(f"seeds must be a multiple of the {count} environments, got {len(seeds)}")
    options = {HELD_OUT: list(seeds)} if held_out else None
    parts = [
        _episodes(task, environments, primitive, choose, seeds[first : first + count], options)
        for first in range(0, len(seeds), count)
    ]
    return Rollout(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _episodes(
    task: Task,
    environments: Environments,
    primitive: ProDMP,
    choose: Callable[[Tensor], Tensor],
    seeds: Sequence[int],
    options: dict[str, Any] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    now, _ = environments.reset(seed=list(seeds), options=options)
    observations, rewards = [torch.as_tensor(now, dtype=torch.float64)], []
    weights = choose(observations[0])
    start = (torch.as_tensor(x, dtype=torch.float64) for x in task.start(now))
    position, velocity = (x.numpy() for x in primitive.trajectory(weights, *start))
    for step in range(1, task.num_steps + 1):
        now, reward, *_, info = environments.step(task.control(now, position[:, step], velocity[:, step]))
        observations.append(torch.as_tensor(now, dtype=torch.float64))
        rewards.append(torch.as_tensor(reward, dtype=torch.float64))
    success = torch.as_tensor(info["success"]).bool()
    return torch.stack(observations, 1), torch.stack(rewards, 1), weights, success
