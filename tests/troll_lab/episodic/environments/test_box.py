"""Box pushing: what moves the box, and both rewards in their closed forms."""

import numpy as np
import pytest

pytest.importorskip("mujoco")

import mujoco

from troll_lab.episodic.environments.arm import JOINTS, torques
from troll_lab.episodic.environments.box import BoxPushing


def started(sparse: bool = False) -> BoxPushing:
    environment = BoxPushing(sparse)
    environment.reset(seed=0)
    return environment


def place_box(environment: BoxPushing, pose: tuple[float, float, float]) -> None:
    environment.data.qpos[JOINTS:] = pose
    mujoco.mj_forward(environment.model, environment.data)


def test_box_lies_still_until_the_rod_pushes_it() -> None:
    environment = started()
    place_box(environment, (1.0, 0.3, 0.0))  # left of where the rod starts
    for _ in range(20):
        observation, *_ = environment.step(np.zeros(JOINTS))
    np.testing.assert_allclose(observation[8:12], [1.0, 0.3, 1, 0], atol=1e-3)
    wanted = observation[:JOINTS] + np.array([0.6, 0, 0])  # the whole arm turns to the left, through the box
    for _ in range(60):
        observation, *_ = environment.step(torques(observation[None], wanted[None], np.zeros((1, JOINTS)))[0])
    assert observation[9] > 0.4
    assert environment.data.qvel[JOINTS:] == pytest.approx(np.zeros(3), abs=0.05)


def test_rewards_are_those_of_the_formula() -> None:
    dense, sparse = started(), started(sparse=True)
    for environment in (dense, sparse):
        place_box(environment, (0.6, 0.1, 0.2))
        environment.target = np.array([0.9, 0.1, 0.2 - np.pi / 2])
    rod = np.linalg.norm(dense.tip - [0.6, 0.1])
    action = np.array([1.0, -1.0, 0.5])
    effort, goal = 5e-4 * 2.25, 3.5 * 0.3 + 2 * 0.5
    assert dense.reward(action, last=False) == dense.reward(action, last=True)
    assert dense.reward(action, last=False) == pytest.approx(-rod - effort - goal)
    assert sparse.reward(action, last=False) == pytest.approx(-rod - effort)
    assert sparse.reward(action, last=True) == pytest.approx(-rod - effort - 100 * goal)


@pytest.mark.parametrize(
    ("off", "success"), [((0.04, 0, 0.4), True), ((0.06, 0, 0), False), ((0, 0, 0.6), False), ((0, 0, 6.2), True)]
)
def test_success_is_a_box_near_its_target_pose(off: tuple[float, float, float], success: bool) -> None:
    environment = started()
    place_box(environment, tuple(environment.target + off))
    assert environment.success() == success


def test_box_and_target_start_apart() -> None:
    environment = BoxPushing()
    for seed in range(50):
        observation, info = environment.reset(seed=seed)
        assert np.linalg.norm(observation[BoxPushing.BOX] - observation[BoxPushing.TARGET]) >= 0.15
        assert not info["success"]
