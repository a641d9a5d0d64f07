"""Box pushing: with a rod at its tip, the arm brings a box to a position and an orientation on the table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from troll_lab.episodic.environments.arm import JOINTS, Arm, arm_model

# Gravity would only press the box on the table: its dry friction (coefficient 0.3, 1 kg) is that of its joints.
_BOX = """
<body name="box">
  <joint type="slide" axis="1 0 0" frictionloss="3" damping="1"/>
  <joint type="slide" axis="0 1 0" frictionloss="3" damping="1"/>
  <joint type="hinge" axis="0 0 1" frictionloss="0.1" damping="0.02"/>
  <geom type="box" size="0.08 0.08 0.05" mass="1" contype="1" conaffinity="1"/>
</body>"""
_ROD = '<geom type="cylinder" pos="0.4 0 0" size="0.03 0.05" mass="0.1" contype="1" conaffinity="1"/>'


class BoxPushing(Arm):
    """Push a box to a target pose, with the rewards of the TCE paper (its appendix) for a rod that is always upright.

    Observations are the angles and velocities of the joints, the position of the tip, and for the box and its target
    the position, and the cosine and sine of the orientation. Success means that the box is within 5 cm and 0.5 rad of
    its target.

    Args:
        sparse: Whether the pose of the box is rewarded at the last step only, with a hundred times the weight.
    """

    BOX, TARGET = slice(8, 10), slice(12, 14)

    def __init__(self, sparse: bool = False) -> None:
        super().__init__(arm_model(_BOX, _ROD), observed=16)
        self.sparse = sparse

    def place(self) -> None:
        """Draws the poses of the box and of its target, at least 15 cm apart, where the arm can push."""
        self.data.qpos[JOINTS:] = self._pose()
        self.target = self._pose()
        while np.linalg.norm(self.target[:2] - self.data.qpos[JOINTS : JOINTS + 2]) < 0.15:
            self.target = self._pose()

    def observe(self) -> NDArray[np.float64]:
        """Joints, tip, box and target."""
        poses = [(*pose[:2], np.cos(pose[2]), np.sin(pose[2])) for pose in (self.data.qpos[JOINTS:], self.target)]
        return np.concatenate([self.data.qpos[:JOINTS], self.data.qvel[:JOINTS], self.tip, *poses])

    def reward(self, action: NDArray[np.float64], last: bool) -> float:
        """Minus the costs of the rod's distance, of torques, and (if sparse, at the end only) of the box's error."""
        distance, turn = self._errors()
        rod = np.clip(np.linalg.norm(self.tip - self.data.qpos[JOINTS : JOINTS + 2]), 0.05, 10)
        goal = 3.5 * distance + 2 * turn / np.pi
        weight = 1.0 if not self.sparse else 100.0 * last
        return -float(rod + 5e-4 * np.sum(action**2) + weight * goal)

    def success(self) -> bool:
        """Whether the box is within 5 cm and 0.5 rad of its target."""
        distance, turn = self._errors()
        return bool(distance < 0.05 and turn < 0.5)

    def _pose(self) -> NDArray[np.float64]:
        return self.np_random.uniform([0.5, -0.4, -0.8], [0.9, 0.4, 0.8])

    def _errors(self) -> tuple[float, float]:
        """The distance of the box from its target in metres, and the error of its orientation in radians."""
        away = self.data.qpos[JOINTS:] - self.target
        return float(np.linalg.norm(away[:2])), float(abs(np.angle(np.exp(1j * away[2]))))
