"""Episodes driven by movements: shapes, repetition, and processes that give the same numbers."""

import pytest
import torch

pytest.importorskip("mujoco")

from troll_lab.episodic import ProDMP
from troll_lab.episodic.environments import make_task
from troll_lab.episodic.rollout import Rollout, collect, make_environments

TASK = make_task("reach")
PRIMITIVE = ProDMP(num_bases=2, num_steps=TASK.num_steps, time_step=TASK.time_step)


def rolled(count: int, seeds: list[int], processes: bool = False, push: float = 0.2) -> Rollout:
    environments = make_environments(TASK, count, processes)
    try:
        return collect(
            TASK, environments, PRIMITIVE, lambda contexts: push * torch.ones(len(contexts), 9).double(), seeds
        )
    finally:
        environments.close()


def test_collect_gives_whole_episodes() -> None:
    rollout = rolled(2, [1, 2, 3, 4])
    assert rollout.observations.shape == (4, 101, 10)
    assert rollout.rewards.shape == (4, 100)
    assert rollout.weights.shape == (4, 9)
    assert rollout.success.shape == (4,) and rollout.success.dtype == torch.bool
    first = [torch.as_tensor(TASK.make().reset(seed=seed)[0]) for seed in (1, 2, 3, 4)]
    assert torch.equal(rollout.contexts, torch.stack(first))
    distance = (rollout.observations[:, 1:, 6:8] - rollout.observations[:, 1:, 8:10]).norm(dim=-1)
    assert (rollout.rewards <= -distance).all()
    assert (rollout.rewards > -distance - 0.031).all()


def test_joints_follow_the_movement() -> None:
    rollout = rolled(1, [1])
    wanted, _ = PRIMITIVE.trajectory(rollout.weights[0], rollout.contexts[0, :3], torch.zeros(3).double())
    assert (rollout.observations[0, -1, :3] - wanted[-1]).abs().max() < 0.05
    assert (rollout.observations[0, :, :3] - wanted).abs().max() < 0.3


@pytest.mark.parametrize(("count", "processes"), [(1, False), (2, True)])
def test_collect_does_not_depend_on_how_many_step_together(count: int, processes: bool) -> None:
    seeds = [1, 2, 3, 4]
    expected, found = rolled(2, seeds), rolled(count, seeds, processes)
    assert torch.equal(found.observations, expected.observations)
    assert torch.equal(found.rewards, expected.rewards)


def test_collect_refuses_seeds_that_do_not_fill_the_environments() -> None:
    with pytest.raises(ValueError, match="seeds must be a multiple of the 2 environments, got 3"):
        rolled(2, [1, 2, 3])
