"""A planar arm of three links on MuJoCo, driven by torques, and the task to reach a point."""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

JOINTS = 3
#: Length of a link, in metres.
LINK = 0.4
#: Gains of the controller that follows a movement: fractions of the largest torques per rad, and per rad/s.
_STIFFNESS, _DAMPING = 3.0, 0.8

_LINK = """
<body pos="{start} 0 0">
  <joint name="joint{number}" axis="0 0 1" damping="0.5" armature="0.2"/>
  <geom type="capsule" fromto="0 0 0 {length} 0 0" size="0.04" density="500"/>
  {inner}
</body>"""
_MODEL = """
<mujoco>
  <option gravity="0 0 0" timestep="0.01" integrator="implicitfast"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>{arm}{scene}</worldbody>
  <actuator>{motors}</actuator>
</mujoco>"""
#: The pose near which episodes begin, in rad.
_POSE = (-0.6, 1.2, -0.6)
#: Largest torques in Nm, from the shoulder to the wrist.
_TORQUES = (20, 10, 5)


def arm_model(scene: str = "", tip: str = "") -> mujoco.MjModel:
    """The model of the arm on a table without gravity, with the shoulder at the origin; by default nothing collides.

    Args:
        scene: MJCF of further bodies.
        tip: MJCF of what is attached to the arm's tip.
    """
    arm = f'<site name="tip" pos="{LINK} 0 0"/>{tip}'
    for number in reversed(range(JOINTS)):
        arm = _LINK.format(start=LINK if number else 0, number=number, length=LINK, inner=arm)
    motors = "".join(
        f'<motor joint="joint{number}" gear="{torque}" ctrlrange="-1 1" ctrllimited="true"/>'
        for number, torque in enumerate(_TORQUES)
    )
    return mujoco.MjModel.from_xml_string(_MODEL.format(arm=arm, scene=scene, motors=motors))


def joints_of(observations: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Angles and velocities of the joints, (B, 3), the first numbers in the observations of every arm."""
    return observations[:, :JOINTS], observations[:, JOINTS : 2 * JOINTS]


def torques(
    observations: NDArray[np.float64], position: NDArray[np.float64], velocity: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The actions (B, 3) that pull the joints to a position and velocity, as shares of the largest torques."""
    now, speed = joints_of(observations)
    return np.clip(_STIFFNESS * (position - now) + _DAMPING * (velocity - speed), -1, 1)


class Arm(gymnasium.Env):
    """An arm with actions in [−1, 1]³, the shares of the largest torques; an episode has 100 steps of 0.02 s.

    Args:
        model: The model, from `arm_model`.
        observed: Size of an observation.
    """

    NUM_STEPS, TIME_STEP = 100, 0.02

    def __init__(self, model: mujoco.MjModel, observed: int) -> None:
        self.model, self.data = model, mujoco.MjData(model)
        self.action_space = gymnasium.spaces.Box(-1, 1, (JOINTS,), np.float64)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observed,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Starts an episode near a bent pose, at rest."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.age = 0
        self.data.qpos[:JOINTS] = self.np_random.uniform(-0.1, 0.1, JOINTS) + _POSE
        self.place()
        mujoco.mj_forward(self.model, self.data)
        return self.observe(), {"success": self.success()}

    def step(self, action: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Applies torques for 0.02 s."""
        action = np.clip(action, -1, 1)
        self.data.ctrl[:] = action
        mujoco.mj_step(self.model, self.data, 2)
        mujoco.mj_kinematics(self.model, self.data)  # where the last step has brought the tip
        self.age += 1
        last = self.age >= self.NUM_STEPS
        return self.observe(), self.reward(action, last), False, last, {"success": self.success()}

    @property
    def tip(self) -> NDArray[np.float64]:
        """The position of the tip in the plane, in metres."""
        return self.data.site_xpos[0, :2].copy()  # the only site

    def place(self) -> None:
        """Draws the episode's task."""
        raise NotImplementedError

    def observe(self) -> NDArray[np.float64]:
        """The observation, which begins with the joints' angles and velocities."""
        raise NotImplementedError

    def reward(self, action: NDArray[np.float64], last: bool) -> float:
        """The reward of a step, computed after the step."""
        raise NotImplementedError

    def success(self) -> bool:
        """Whether the task is currently solved."""
        raise NotImplementedError


class ArmReach(Arm):
    """Reach a point of the plane and stay there: the reward is minus the distance, minus a small cost of torques.

    Observations are the angles and velocities of the joints, and the positions of the tip and of the target. Success
    means that the tip is within 5 cm of the target.
    """

    TIP, TARGET = slice(6, 8), slice(8, 10)

    def __init__(self) -> None:
        super().__init__(arm_model(), observed=10)

    def place(self) -> None:
        """Draws a target in the part of the ring in front of the arm."""
        angle, radius = self.np_random.uniform(-1.5, 1.5), np.sqrt(self.np_random.uniform(0.5**2, 1.1**2))
        self.target = radius * np.array([np.cos(angle), np.sin(angle)])

    def observe(self) -> NDArray[np.float64]:
        """Joints, tip and target."""
        return np.concatenate([self.data.qpos, self.data.qvel, self.tip, self.target])

    def reward(self, action: NDArray[np.float64], last: bool) -> float:
        """Minus the distance in metres, minus 0.01 times the sum of the squared actions."""
        return -float(np.linalg.norm(self.tip - self.target) + 0.01 * np.sum(action**2))

    def success(self) -> bool:
        """Whether the tip is within 5 cm of the target."""
        return bool(np.linalg.norm(self.tip - self.target) < 0.05)
