"""The settings of a run on movements, from a recipe and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from troll.files import read_yaml
from troll.terminal import did_you_mean

FOLDER = Path(__file__).parent / "recipes"
CHOICES = {"events": ("segments", "episodes"), "constraint": ("trust_region", "clip")}


@dataclass
class EpisodicConfig:
    """Every setting of a run.

    Attributes:
        environment: `reach`, `box`, `box-sparse`, or a task of Meta-World such as `metaworld:reach-v3`.
        events: What the ratio is of: `segments` of a movement (TCE), or whole `episodes` (black-box).
        constraint: What holds the policy back: the `trust_region`, or the `clip` of the ratio.
        mean_bound: KL of the means at most, in nats.
        covariance_bound: KL of the covariances at most, in nats.
        pull_weight: Weight of the pull to the projection in the loss.
        clip: The ratio stays within 1 ± this, for `constraint: clip`.
        num_bases: Bases of each joint.
        alpha: Stiffness of the movement.
        initial_scale: Standard deviation of the weights at the start, in units of the joints.
        contextual_covariance: Whether the covariance depends on the context.
        segment_points: Time points at which a movement is cut.
        likelihood_noise: Variance of a position about its movement, in squared units of the joints.
        discount: γ of a step.
        gae_decay: λ of the critic's targets.
        iterations: Rollouts, each followed by updates.
        episodes: Episodes of a rollout.
        updates: Of the policy, on each rollout as a whole.
        critic_updates: Of the critic, on each rollout as a whole.
        learning_rate: Adam's, for the policy.
        critic_learning_rate: Adam's, for the critic.
        max_grad_norm: A longer gradient is shortened to it. The pull grows with the square of the distance to the
            region, so one step too far would otherwise lead to larger ones.
        hidden: Units in each of two hidden layers of the networks.
        eval_every: Iterations between evaluations, each of which also saves a checkpoint.
        eval_episodes: Episodes of an evaluation, always the same, with the mean movement.
        num_envs: Environments that step together; divides `episodes` and `eval_episodes`.
        processes: Whether each environment has a process of its own.
        seed: Seed of the initial networks, of movements and episodes.
        output_dir: The run's folder.
        resume_from_checkpoint: Whether to go on in a folder that holds this run.
    """

    environment: str = "reach"
    events: str = "segments"
    constraint: str = "trust_region"
    mean_bound: float = 0.05
    covariance_bound: float = 5e-4
    pull_weight: float = 1.0
    clip: float = 0.2
    num_bases: int = 5
    alpha: float = 25.0
    initial_scale: float = 0.3
    contextual_covariance: bool = False
    segment_points: int = 25
    likelihood_noise: float = 1e-5
    discount: float = 1.0
    gae_decay: float = 0.95
    iterations: int = 400
    episodes: int = 64
    updates: int = 20
    critic_updates: int = 10
    learning_rate: float = 3e-4
    critic_learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    hidden: int = 64
    eval_every: int = 20
    eval_episodes: int = 128
    num_envs: int = 64
    processes: bool = False
    seed: int = 0
    output_dir: str = "runs/episodic"
    resume_from_checkpoint: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and field.name not in ("seed", "pull_weight") and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
        for name in ("episodes", "eval_episodes"):
            if getattr(self, name) % self.num_envs:
                raise ValueError(f"{name} must be a multiple of num_envs={self.num_envs}, got {getattr(self, name)}")

    def settings(self) -> dict[str, Any]:
        """What a run records: all but how it was started."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != _HOW_IT_STARTS}


#: A field that is no setting of the run.
_HOW_IT_STARTS = "resume_from_checkpoint"


def recipe_names() -> list[str]:
    """The recipes of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_recipe(name_or_path: str) -> bool:
    """Whether a recipe is one of this package, or a file that names an `environment`."""
    path = Path(name_or_path)
    return name_or_path in recipe_names() or (
        path.suffix in (".yaml", ".yml") and path.is_file() and "environment" in read_yaml(path)
    )


def load(name_or_path: str, overrides: Sequence[str] = ()) -> EpisodicConfig:
    """Reads a recipe and applies `--field value` pairs on top.

    Raises:
        ValueError: If a field is unknown or a value does not fit it.
    """
    path = FOLDER / f"{name_or_path}.yaml" if name_or_path in recipe_names() else Path(name_or_path)
    parser = _Parser(allow_abbrev=False, add_help=False)
    for field in fields(EpisodicConfig):
        if field.type == "bool":
            parser.add_argument(f"--{field.name}", nargs="?", const=True, type=_boolean)
        else:
            parser.add_argument(f"--{field.name}", type={"int": int, "float": float, "str": str}[str(field.type)])
    given, unknown = parser.parse_known_args(list(overrides))
    settings = read_yaml(path) | {name: value for name, value in vars(given).items() if value is not None}
    known = {field.name for field in fields(EpisodicConfig)}
    for name in [*settings, *(argument.removeprefix("--") for argument in unknown)]:
        if name not in known:
            raise ValueError(f"unknown field {name!r}{did_you_mean(name, known)}")
    return EpisodicConfig(**settings)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"
