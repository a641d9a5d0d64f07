"""Recipes: YAML files with every setting of a run, found by name or by path.

A recipe holds fields of :class:`~troll.tasks.TaskConfig`, :class:`~troll.trl.TrollConfig` and
:class:`trl.ModelConfig`, and what it leaves out has their defaults. To add one, add a file to this folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from trl import ModelConfig, TrlParser

from troll.tasks import TaskConfig
from troll.trl import TrollConfig

FOLDER = Path(__file__).parent
CONFIGS = (TaskConfig, TrollConfig, ModelConfig)


class RecipeError(ValueError):
    """A recipe or setting that cannot be used; the message is one line that says what is wrong and what to do."""


@dataclass
class Recipe:
    """A recipe with its overrides, parsed.

    Attributes:
        given: As the user gave it, a name or a path.
        name: The same without folder and ending.
        settings: What the recipe and the command line set, as :func:`save` writes it.
        task: What to train on.
        training: How.
        model: With what.
    """

    given: str
    name: str
    settings: dict[str, Any]
    task: TaskConfig
    training: TrollConfig
    model: ModelConfig


def names() -> list[str]:
    """The recipes of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name_or_path: str) -> Path:
    """The file of a recipe.

    Raises:
        RecipeError: If there is none.
    """
    if name_or_path in names():
        return FOLDER / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    hint = _did_you_mean(name_or_path, names())
    raise RecipeError(f"no recipe or YAML file {name_or_path!r}{hint}; recipes: {', '.join(names())}")


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies ``--field value`` pairs on top.

    Raises:
        RecipeError: On an unknown recipe or field, or a value that does not fit its field.
    """
    path = find(name_or_path)
    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise RecipeError(f"{path} must hold 'field: value' lines")

    known = {field.name for config in CONFIGS for field in fields(config) if field.init}
    for name in settings:
        if name not in known:
            raise RecipeError(f"{path}: unknown field {name!r}{_did_you_mean(str(name), known)}")
    overrides = _complete(overrides)
    parser = _Parser(list(CONFIGS), allow_abbrev=False)  # type: ignore[arg-type]
    parser.set_defaults_with_config(**settings)
    try:
        task, training, model, unknown = parser.parse_args_into_dataclasses(
            args=overrides, return_remaining_strings=True
        )
    except RecipeError:
        raise
    except (ValueError, TypeError) as error:  # the configurations' own validation
        raise RecipeError(_one_line(error)) from error
    if unknown:
        field = unknown[0].removeprefix("--").split("=")[0]
        raise RecipeError(f"unknown argument {unknown[0]!r}{_did_you_mean(field, known, prefix='--')}")

    given = {argument[2:].split("=")[0].replace("-", "_") for argument in overrides if argument.startswith("--")}
    own = {field.name for field in fields(TaskConfig)} | set(TrollConfig.__annotations__)
    values = {field.name: getattr(config, field.name) for config in (task, training, model) for field in fields(config)}
    # Where a run was resumed from does not belong to what it is.
    names_set = sorted((given | own | set(settings)) - {"resume_from_checkpoint"})
    resolved = {name: values[name] for name in names_set if values.get(name) is not None or name in settings}
    return Recipe(name_or_path, path.stem, resolved, task, training, model)


def save(recipe: Recipe, path: Path) -> None:
    """Writes the resolved settings as a recipe that :func:`load` reads back."""
    lines = yaml.safe_dump({name: _plain(value) for name, value in recipe.settings.items()}, sort_keys=False)
    path.write_text(f"# {recipe.name}, resolved; train again with: troll train {path} --output_dir ANOTHER\n{lines}")


class _Parser(TrlParser):
    def error(self, message: str) -> Any:
        # argparse would print the usage of several hundred fields.
        raise RecipeError(_one_line(message))


def _complete(overrides: Sequence[str]) -> list[str]:
    # `--resume_from_checkpoint` alone means the last one; TRL's parser wants a value.
    completed = list(overrides)
    for index, argument in enumerate(completed):
        follows = completed[index + 1] if index + 1 < len(completed) else "--"
        if argument == "--resume_from_checkpoint" and follows.startswith("--"):
            completed[index] = "--resume_from_checkpoint=last"
    return completed


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _did_you_mean(name: str, known: Sequence[str] | set[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
