"""The settings of a run on movements, from a recipe and the command line, and the files of its folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from troll.settings import check_number, did_you_mean, number
from troll_lab import values

FOLDER = Path(__file__).parent / "recipes"
_READERS: dict[str, Callable[[str], Any]] = {"int": values.whole_number, "float": values.number, "str": str}
#: The files of a run's folder.
CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
#: The paths of a few held-out episodes before and after training, and their targets.
PATHS = "paths.json"
CHOICES = {"events": ("segments", "episodes"), "constraint": ("trust_region", "clip")}


@dataclass
class EpisodicConfig:
    """Every setting of a run.

    Attributes:
        environment: `reach`, `box`, `box-sparse`, or a task of Meta-World such as `metaworld:reach-v3`.
        events: The events of the importance ratio: `segments` of a movement (TCE), or whole `episodes` (black-box).
        constraint: The limit on an update: the `trust_region`, or the `clip` of the ratio.
        mean_bound: Bound on the KL of the means, in nats.
        covariance_bound: Bound on the KL of the covariances, in nats.
        pull_weight: Weight of the pull to the projection in the loss.
        clip: Half-width of the clip's interval around 1, for `constraint: clip`.
        num_bases: Number of basis functions of each joint.
        alpha: Stiffness of the movement.
        initial_scale: Standard deviation of the weights at the start, in units of the joints.
        contextual_covariance: Whether the covariance depends on the context.
        segment_points: Number of time points at which a movement is cut into segments.
        likelihood_noise: Variance of a position about its movement, in squared units of the joints.
        discount: Discount γ of a step.
        gae_decay: λ of the critic's targets.
        iterations: Number of rollouts, each followed by updates.
        episodes: Number of episodes in a rollout.
        updates: Number of updates of the policy per rollout, each on the whole rollout.
        critic_updates: Number of updates of the critic per rollout, each on the whole rollout.
        learning_rate: Learning rate of the policy's Adam.
        critic_learning_rate: Learning rate of the critic's Adam.
        max_grad_norm: The norm to which gradients are clipped. The pull grows with the square of the distance to the
            region, so without clipping one large step would lead to larger ones.
        hidden: Units in each of the two hidden layers of the networks.
        eval_every: Iterations between evaluations.
        eval_episodes: Number of episodes in an evaluation, always the same, with the mean movement. None is one of
            training: in Meta-World each has a task of its own that training never draws.
        num_envs: Number of environments that step together; divides `episodes` and `eval_episodes`.
        processes: Whether each environment runs in its own process.
        seed: Seed of the initial networks, of movements and episodes.
        output_dir: The run's folder.
        resume_from_checkpoint: Whether to resume the run in a folder.
    """

    environment: str = "reach"
    events: str = "segments"
    constraint: str = "trust_region"
    mean_bound: float = number(0.05, "above 0")
    covariance_bound: float = number(5e-4, "above 0")
    pull_weight: float = number(1.0, "finite and at least 0")
    clip: float = number(0.2, "finite and above 0")
    num_bases: int = number(5, "an integer, at least 1")
    alpha: float = number(25.0, "finite and above 0")
    initial_scale: float = number(0.3, "finite and above 0")
    contextual_covariance: bool = False
    segment_points: int = number(25, "an integer, at least 1")
    likelihood_noise: float = number(1e-5, "finite and above 0")
    discount: float = number(1.0, "in (0, 1]")
    gae_decay: float = number(0.95, "in [0, 1]")
    iterations: int = number(400, "an integer, at least 1")
    episodes: int = number(64, "an integer, at least 1")
    updates: int = number(20, "an integer, at least 1")
    critic_updates: int = number(10, "an integer, at least 1")
    learning_rate: float = number(3e-4, "finite and above 0")
    critic_learning_rate: float = number(1e-3, "finite and above 0")
    max_grad_norm: float = number(1.0, "finite and above 0")
    hidden: int = number(64, "an integer, at least 1")
    eval_every: int = number(20, "an integer, at least 1")
    eval_episodes: int = number(128, "an integer, at least 1")
    num_envs: int = number(64, "an integer, at least 1")
    processes: bool = False
    seed: int = number(0, "an integer in [0, 2^32)")
    output_dir: str = "runs/episodic"
    resume_from_checkpoint: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")
        for field in fields(self):
            if takes := field.metadata.get("takes"):
                check_number(field.name, getattr(self, field.name), takes)
        for name in ("episodes", "eval_episodes"):
            if getattr(self, name) % self.num_envs:
                raise ValueError(f"{name} must be a multiple of num_envs={self.num_envs}, got {getattr(self, name)}")

    def settings(self) -> dict[str, Any]:
        """The settings that a run records: all except how it was started."""
        names = [field.name for field in fields(self) if field.name != "resume_from_checkpoint"]
        return {name: getattr(self, name) for name in names}


def recipe_names() -> list[str]:
    """The recipes of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_recipe(name_or_path: str) -> bool:
    """Whether a recipe is one of this package, or a file that names an `environment`."""
    path = Path(name_or_path)
    if name_or_path in recipe_names():
        return True
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        return "environment" in values.read_yaml(path)
    except ValueError:
        return False  # `troll_lab.recipes.load` names the mistake


def load(name_or_path: str, overrides: Sequence[str] = ()) -> EpisodicConfig:
    """Reads a recipe and applies `--field value` pairs on top.

    Raises:
        ValueError: If a field is unknown or a value does not fit it.
    """
    path = FOLDER / f"{name_or_path}.yaml" if name_or_path in recipe_names() else Path(name_or_path)
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser._negative_number_matcher = values.NEGATIVE
    for field in fields(EpisodicConfig):
        if field.type == "bool":
            parser.add_argument(f"--{field.name}", nargs="?", const=True, type=_boolean)
        else:
            parser.add_argument(f"--{field.name}", type=_READERS[str(field.type)])
    written = values.read_yaml(path)
    if empty := [name for name, value in written.items() if value is None]:
        raise ValueError(f"{path}: {empty[0]} has no value")
    recipe = [f"--{name}={value}" for name, value in written.items()]
    given, unknown = parser.parse_known_args([*recipe, *overrides])
    if unknown:
        name = unknown[0].removeprefix("--").partition("=")[0]
        raise ValueError(f"unknown field {name!r}{did_you_mean(name, vars(given))}")
    return EpisodicConfig(**{name: value for name, value in vars(given).items() if value is not None})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"


def is_episodic(folder: Path) -> bool:
    """Whether a folder holds a run on movements."""
    return (folder / PATHS).is_file()
