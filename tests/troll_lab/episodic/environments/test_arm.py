"""The arm: its geometry, its controller, and the reaching task."""

import numpy as np
import pytest

pytest.importorskip("mujoco")

from gymnasium.utils.env_checker import check_env

from troll_lab.episodic import environments
from troll_lab.episodic.environments.arm import JOINTS, LINK, ArmReach, joints_of, torques


@pytest.mark.filterwarnings("ignore:.*A Box observation space")  # which has no bounds
@pytest.mark.parametrize("name", ["reach", "box", "box-sparse"])
def test_environment_keeps_gymnasiums_rules(name: str) -> None:
    check_env(environments.make_task(name).make(), skip_render_check=True)


@pytest.mark.parametrize("name", ["reach", "box"])
def test_reset_repeats_with_its_seed(name: str) -> None:
    task = environments.make_task(name)
    first, second, other = (task.make().reset(seed=seed)[0] for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_tip_is_where_the_angles_put_it() -> None:
    arm = ArmReach()
    observation, _ = arm.reset(seed=0)
    direction = np.cumsum(observation[:JOINTS])
    expected = LINK * np.array([np.cos(direction).sum(), np.sin(direction).sum()])
    np.testing.assert_allclose(observation[ArmReach.TIP], expected, atol=1e-12)


def test_controller_brings_the_joints_to_a_position() -> None:
    arm = ArmReach()
    observation, _ = arm.reset(seed=0)
    wanted = observation[:JOINTS] + np.array([0.5, -0.7, 0.9])
    for _ in range(100):
        action = torques(observation[None], wanted[None], np.zeros((1, JOINTS)))[0]
        assert (np.abs(action) <= 1).all()
        observation, *_ = arm.step(action)
    position, velocity = joints_of(observation[None])
    np.testing.assert_allclose(position[0], wanted, atol=0.01)
    np.testing.assert_allclose(velocity[0], 0, atol=0.05)


def test_reach_is_rewarded_for_nearness_and_ends_by_its_length() -> None:
    arm = ArmReach()
    observation, _ = arm.reset(seed=1)
    for step in range(100):
        observation, reward, terminated, truncated, info = arm.step(np.full(JOINTS, 0.1))
        distance = np.linalg.norm(observation[ArmReach.TIP] - observation[ArmReach.TARGET])
        assert reward == pytest.approx(-distance - 0.01 * JOINTS * 0.01)
        assert not terminated
        assert truncated == (step == 99)
        assert info["success"] == (distance < 0.05)
    arm.target = arm.tip
    assert arm.success()


def test_make_task_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="environment must be reach, box, box-sparse or metaworld:NAME, got 'push'"):
        environments.make_task("push")
