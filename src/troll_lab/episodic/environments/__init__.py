"""Environments, and how a movement controls each of them."""

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
        'troll_lab.episodic.environments needs gymnasium and mujoco: pip install "troll-rl[episodic]"'
    ) from None
import numpy as np
from numpy.typing import NDArray

from troll_lab.episodic.environments.arm import Arm, ArmReach, joints_of, torques
from troll_lab.episodic.environments.box import BoxPushing
from troll_lab.episodic.environments.metaworld import gripper_of, make_metaworld, steps_to

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """An environment and its interface to movements. Its episodes have a fixed number of steps.

    Functions take the observations of B environments, (B, o).

    Attributes:
        make: A function that makes one environment of gymnasium's API, whose `info` has `success` at every step.
        num_steps: Number of steps of an episode.
        time_step: Duration of a step in seconds, which only sets the unit of velocities.
        start: A function from the first observations to the positions and velocities (B, D) from which movements start.
        control: A function from observations and the movement's next positions and velocities (B, D) to actions (B, a).
        moving: The indices in an observation of the position of the object that moves to the target, for pictures.
        target: The indices in an observation of the position of the target.
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
        ValueError: For any other name.
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
