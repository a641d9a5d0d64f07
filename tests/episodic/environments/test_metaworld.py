"""The adapter for Meta-World, with a stand-in that has its API; with Meta-World itself where that is installed."""

import sys
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("mujoco")

from troll.episodic.environments import make_task
from troll.episodic.environments.metaworld import make_metaworld


class StandIn(gymnasium.Env):
    """As `Meta-World/MT1`: 39 numbers, a task to be set before a reset, and a reset that ignores its seed."""

    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float64)

    def __init__(self, env_name: str, seed: int) -> None:
        self.draws_tasks = True
        self.tasks = [np.array([0.0, 0.6 + 0.005 * number, 0.2]) for number in range(50)]

    def toggle_sample_tasks_on_reset(self, on: bool) -> None:
        self.draws_tasks = on

    def set_task(self, task: np.ndarray) -> None:
        self.goal = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        assert not self.draws_tasks
        self.gripper = np.array([0.0, 0.6, 0.2, 1.0])
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert (np.abs(action) <= 1).all()
        self.gripper[:3] += 0.01 * action[:3]
        near = float(np.linalg.norm(self.gripper[:3] - self.goal) < 0.05)
        return self.observe(), near, False, False, {"success": near}

    def observe(self) -> np.ndarray:
        return np.concatenate([self.gripper, np.zeros(32), self.goal])


def make_stand_in(**settings: Any) -> gymnasium.Env:
    return StandIn(**settings)


@pytest.fixture
def metaworld(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta-World, or its stand-in under the same name."""
    try:
        import metaworld  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "metaworld", ModuleType("metaworld"))
        spec = gymnasium.envs.registration.EnvSpec("Meta-World/MT1", make_stand_in, max_episode_steps=500)
        monkeypatch.setitem(gymnasium.registry, "Meta-World/MT1", spec)


@pytest.mark.usefixtures("metaworld")
def test_seed_of_a_reset_chooses_the_task() -> None:
    environment = make_metaworld("reach-v3")
    goals = [environment.reset(seed=seed)[0][-3:] for seed in (0, 1, 0, 2)]
    assert np.array_equal(goals[0], goals[2])
    assert len({tuple(goal) for goal in goals}) > 1


@pytest.mark.usefixtures("metaworld")
def test_gripper_follows_a_movement_to_the_goal() -> None:
    task = make_task("metaworld:reach-v3")
    environment = task.make()
    observation, _ = environment.reset(seed=0)
    start, velocity = task.start(observation[None])
    assert start.shape == (1, 4)
    assert not velocity.any()
    wanted = np.append(observation[-3:], 1.0)[None]
    for _ in range(100):
        observation, _, _, _, info = environment.step(task.control(observation[None], wanted, velocity)[0])
    np.testing.assert_allclose(observation[:3], observation[-3:], atol=0.02)
    assert info["success"] == 1.0


def test_missing_metaworld_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ImportError, match="metaworld is not installed"):
        make_metaworld("reach-v3")
