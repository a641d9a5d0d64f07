"""Tasks of Meta-World 3, controlled by movements of the gripper.

Meta-World pins MuJoCo 3.3.0, so it is not a part of the extra `episodic`: use `pip install metaworld` in a separate
environment.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

#: The option of a reset that makes its episode one of evaluation: the seeds of all of these, all different.
HELD_OUT = "held_out"

#: The distance that an action of 1 moves the gripper, in metres.
_STEP = 0.01


class _SeededTask(gymnasium.Wrapper):
    """Draws the episode's task by the seed of the reset: Meta-World's own draw cannot be repeated.

    MT1 has 50 tasks, and a reset draws one of them. With the option `HELD_OUT`, the seeds of all held-out episodes,
    each of these seeds has a task of its own, outside the 50.
    """

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self._name = name

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float64], dict[str, Any]]:
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        tasks = self.get_wrapper_attr("tasks")
        if options and HELD_OUT in options:
            seeds = tuple(options[HELD_OUT])
            task = _held_out(self._name, seeds, frozenset(map(_value, tasks)))[seeds.index(seed)]
        else:
            task = tasks[self.np_random.integers(len(tasks))]
        self.get_wrapper_attr("toggle_sample_tasks_on_reset")(False)
        self.get_wrapper_attr("set_task")(task)
        return self.env.reset(seed=seed)


@functools.cache
def _held_out(name: str, seeds: tuple[int, ...], trained: frozenset[tuple[float, ...]]) -> list[Any]:
    """As many tasks as seeds, all different, from MT1 with these seeds one after another.

    Cached, since MT1 takes seconds to make, and many environments of a process need the same tasks.

    Args:
        name: The environment's name.
        seeds: The seeds of the held-out episodes.
        trained: The values of the tasks that training draws from.

    Raises:
        ValueError: If there are fewer.
    """
    import metaworld

    found: dict[tuple[float, ...], Any] = {}
    for seed in seeds:
        for task in metaworld.MT1(name, seed=seed).train_tasks:
            if (value := _value(task)) not in trained:
                found.setdefault(value, task)
        if len(found) >= len(seeds):
            return list(found.values())[: len(seeds)]
    raise ValueError(
        f"{name} has {len(found)} tasks that training does not draw, and eval_episodes must be at most as many, got "
        f"{len(seeds)}"
    )


def _value(task: Any) -> tuple[float, ...]:
    """The positions of objects and goal, in which the tasks of an environment differ."""
    return tuple(pickle.loads(task.data)["rand_vec"].tolist())


def make_metaworld(name: str) -> gymnasium.Env:
    """A task of Meta-World's MT1, such as `reach-v3`: episodes of 500 steps, the goal in the observation.

    Raises:
        ImportError: If Meta-World is not installed.
    """
    try:
        import metaworld  # noqa: F401  it registers its environments
    except ImportError as error:
        raise ImportError(
            "metaworld is not installed; it needs its own version of mujoco: pip install metaworld in an environment "
            "of its own"
        ) from error
    # Training's tasks are always the same 50. gymnasium's checker only warns about the bounds of observations.
    return _SeededTask(gymnasium.make("Meta-World/MT1", env_name=name, seed=0, disable_env_checker=True), name)


def gripper_of(observations: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The position of the gripper in metres and its opening, (B, 4), and velocities of zero."""
    position = observations[:, :4].copy()
    return position, np.zeros_like(position)


def steps_to(
    observations: NDArray[np.float64], position: NDArray[np.float64], velocity: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The actions (B, 4) that bring the gripper to a position; the fourth, its force, is 1 − opening, scaled to ±1."""
    move = (position[:, :3] - observations[:, :3]) / _STEP
    force = 1 - 2 * position[:, 3:]
    return np.clip(np.concatenate([move, force], 1), -1, 1)
