"""The adapter for Meta-World, with a stand-in that has its API; with Meta-World itself where that is installed."""

import contextlib
import dataclasses
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("mujoco")

from troll_lab.episodic import ProDMP
from troll_lab.episodic.environments import make_task
from troll_lab.episodic.environments.metaworld import make_metaworld
from troll_lab.episodic.rollout import collect, make_environments


class Task(NamedTuple):
    """As Meta-World's: its data are a pickle."""

    env_name: str
    data: bytes


class MT1:
    """50 tasks of a seed. Those of the next seed begin at its last one."""

    def __init__(self, env_name: str, seed: int) -> None:
        goals = [np.array([0.0, 0.6 + 0.005 * (49 * seed + number) % 1, 0.2]) for number in range(50)]
        self.train_tasks = [Task(env_name, pickle.dumps({"rand_vec": goal})) for goal in goals]


class StandIn(gymnasium.Env):
    """As `Meta-World/MT1`: 39 numbers, a task to be set before a reset, and a reset that ignores its seed."""

    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float64)

    def __init__(self, env_name: str, seed: int) -> None:
        self.draws_tasks = True
        self.tasks = MT1(env_name, seed).train_tasks

    def toggle_sample_tasks_on_reset(self, on: bool) -> None:
        self.draws_tasks = on

    def set_task(self, task: Task) -> None:
        self.goal = pickle.loads(task.data)["rand_vec"]

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
        module = ModuleType("metaworld")
        monkeypatch.setattr(module, "MT1", MT1, raising=False)
        monkeypatch.setitem(sys.modules, "metaworld", module)
        spec = gymnasium.envs.registration.EnvSpec("Meta-World/MT1", make_stand_in, max_episode_steps=500)
        monkeypatch.setitem(gymnasium.registry, "Meta-World/MT1", spec)


@pytest.mark.usefixtures("metaworld")
def test_seed_of_a_reset_chooses_the_task() -> None:
    environment = make_metaworld("reach-v3")
    goals = [environment.reset(seed=seed)[0][-3:] for seed in (0, 1, 0, 2)]
    assert np.array_equal(goals[0], goals[2])
    assert len({tuple(goal) for goal in goals}) > 1


def trained_goals(environment: gymnasium.Env) -> set[tuple[float, ...]]:
    return {tuple(pickle.loads(task.data)["rand_vec"][-3:]) for task in environment.get_wrapper_attr("tasks")}


@pytest.mark.usefixtures("metaworld")
@pytest.mark.parametrize("seeds", [list(range(64)), [*range(1000, 1064)]])
def test_held_out_episodes_have_tasks_of_their_own(seeds: list[int]) -> None:
    environment = make_metaworld("reach-v3")

    def goal(seed: int, **options: Any) -> tuple[float, ...]:
        return tuple(environment.reset(seed=seed, options=options or None)[0][-3:])

    trained = trained_goals(environment)
    assert len(trained) == 50
    held_out = [goal(seed, held_out=seeds) for seed in seeds]
    assert len(set(held_out)) == len(seeds) and not trained & set(held_out)
    again = make_metaworld("reach-v3").reset(seed=seeds[1], options={"held_out": seeds})[0]
    assert tuple(again[-3:]) == held_out[1]
    assert {goal(seed) for seed in range(5)} <= trained  # training goes on with its own


def test_more_held_out_episodes_than_tasks_are_refused(metaworld: None, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = make_metaworld("reach-v3")
    module: Any = sys.modules["metaworld"]
    few = [*environment.get_wrapper_attr("tasks"), *module.MT1("reach-v3", seed=1).train_tasks[1:3]]
    monkeypatch.setattr(module, "MT1", lambda name, seed: SimpleNamespace(train_tasks=few))  # of every seed
    environment.reset(seed=5, options={"held_out": [5, 6]})
    with pytest.raises(
        ValueError, match=r"reach-v3 has 2 tasks that training does not draw, .* at most as many, got 3"
    ):
        environment.reset(seed=5, options={"held_out": [5, 6, 7]})


@pytest.mark.usefixtures("metaworld")
def test_evaluation_is_on_held_out_tasks() -> None:
    """As training collects it: in every environment, and in batches."""
    task, seeds = make_task("metaworld:reach-v3"), [11, 12, 13, 14]
    task = dataclasses.replace(task, num_steps=1)
    primitive = ProDMP(num_bases=2, num_steps=1, time_step=task.time_step)
    environments = make_environments(task, 2, processes=True)

    def goals(seeds: list[int], held_out: bool) -> set[tuple[float, ...]]:
        rollout = collect(
            task, environments, primitive, lambda x: torch.zeros(len(x), 12).double(), seeds, held_out=held_out
        )
        return set(map(tuple, rollout.contexts[:, -3:].tolist()))

    with contextlib.closing(environments):
        held_out, drawn = goals(seeds, True), goals(seeds, False)
    trained = trained_goals(task.make())
    assert len(held_out) == 4 and not held_out & trained and drawn <= trained


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
