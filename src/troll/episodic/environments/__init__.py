"""Environments, and how a movement drives each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

try:
    import gymnasium
    import mujoco  # noqa: F401 (first: the arms need it)
except ModuleNotFoundError as error:
    if error.name not in ("gymnasium", "mujoco"):
        raise
    raise ImportError(
        'troll.episodic.environments needs gymnasium and mujoco: pip install "troll-rl[episodic]"'
    ) from None
import numpy as np
from numpy.typing import NDArray

from troll.episodic.environments.arm import Arm, ArmReach, joints_of, torques
from troll.episodic.environments.box import BoxPushing
from troll.episodic.environments.metaworld import gripper_of, make_metaworld, steps_to

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """An environment as a movement sees it. Its episodes have a fixed number of steps and end by their length only.

    Functions take the observations of B environments, (B, o).

    Attributes:
        make: Makes one environment of gymnasium's API, whose `info` has a `success` at every step.
        num_steps: Steps of an episode.
        time_step: Seconds of a step, which only set the unit of velocities.
        start: From observations to what the movement moves, positions and velocities (B, D) at the start.
        control: From observations, and position and velocity (B, D) that the movement wants next, to actions (B, a).
        moving: The numbers in an observation that are the place of what moves to its target, for pictures.
        target: The numbers that are the place of the target.
    """

    make: Callable[[], gymnasium.Env]
    num_steps: int
    time_step: float
    start: Callable[[Array], tuple[Array, Array]]
    control: Callable[[Array, Array, Array], Array]
    moving: slice
    target: slice


def make_task(name: str) -> Task:
    """The task of a name: `reach`, `box`, `box-sparse`, or a task of Meta-World such as `metaworld:reach-v3`.

    Raises:
        ValueError: On another name.
    """
    if name == "reach":
        return Task(ArmReach, Arm.NUM_STEPS, Arm.TIME_STEP, joints_of, torques, ArmReach.TIP, ArmReach.TARGET)
    if name in ("box", "box-sparse"):

        def make() -> gymnasium.Env:
            return BoxPushing(sparse=name == "box-sparse")

        return Task(make, Arm.NUM_STEPS, Arm.TIME_STEP, joints_of, torques, BoxPushing.BOX, BoxPushing.TARGET)
    if name.startswith("metaworld:"):
        task_name = name.removeprefix("metaworld:")
        return Task(lambda: make_metaworld(task_name), 500, 0.0125, gripper_of, steps_to, slice(0, 2), slice(36, 38))
    raise ValueError(f"environment must be reach, box, box-sparse or metaworld:NAME, got {name!r}")
