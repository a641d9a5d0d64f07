"""The layers of a run's settings: a recipe's file, below it those that it extends, and a command's words on top."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.settings import did_you_mean
from troll_lab import plugins
from troll_lab.recipes.fields import (
    DICTIONARIES,
    FIELDS,
    LISTS,
    PLUGINS,
    ROLLOUT_LENGTH,
    RecipeError,
    dictionary,
    field_of,
)
from troll_lab.tasks import TaskConfig
from troll_lab.terminal import raised_as
from troll_lab.trl import LabConfig
from troll_lab.values import read_value, read_yaml

FOLDER = Path(__file__).parent
#: Fields whose value has settings of its own: its default, and the dictionary of these settings.
OWNERS = {"surrogate": (LabConfig.surrogate, "surrogate_kwargs"), "task": (TaskConfig.task, "task_options")}
#: The file in which a run keeps its resolved settings, itself a recipe.
CONFIG_FILE = "config.yaml"


def names() -> list[str]:
    """The names of the recipes in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def name_of(path: Path) -> str:
    """A recipe's name: its file without the ending; for a run's own settings, the run's folder."""
    return path.resolve().parent.name if path.name == CONFIG_FILE else path.stem


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
    hint = did_you_mean(name_or_path, names())
    raise RecipeError(f"no recipe or YAML file {name_or_path!r}{hint}; recipes: {', '.join(names())}")


def layered(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[Any]], Overrides, list[str]]:
    """Reads a recipe's file with all it extends, imports its plugins, and lays the words of a command on top.

    Returns:
        The settings; the grid of the recipe; the command's own settings; and the plugins.

    Raises:
        RecipeError: If a file is not a recipe, a field is unknown, a plugin cannot be imported, or a word cannot be
            read.
    """
    below, grid = _read_file(path)
    above = split(overrides)
    if "kl_target" in above.given and str(above.given["kl_target"]).lower() in ("none", "null"):
        _check_rate_is_given(path, above.given, below)
    loaded = load_plugins(path, below.pop(PLUGINS, []), above.plugins)
    settings = left_by(above.given, below)
    for name, value in above.inner.items():  # the other settings of a dictionary stay
        field = field_of(name)
        held = settings.get(field) or {}
        settings[field] = {
            **(dictionary(field, held) if isinstance(held, str) else held),
            name.partition(".")[2]: value,
        }
    return settings, grid, above, loaded


def read(name_or_path: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Reads a recipe with all it extends.

    Args:
        name_or_path: The recipe's name, or the path of its file.

    Returns:
        Its fields, and its grid: the values of every field in which several runs differ, empty for a single run.

    Raises:
        RecipeError: If the recipe or a field is unknown, or the file is not a recipe.
    """
    return _read_file(find(name_or_path))


def _read_file(path: Path, below: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """As `read`, for the file of a recipe that the files `below` extend."""
    if path.resolve() in below:
        raise RecipeError(f"{path} extends itself")
    with raised_as(RecipeError):
        own = read_yaml(path)
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    extended = _extended(path, own)
    own.pop("extends", None)
    if extended is not None:
        settings, grid = _read_file(extended, (*below, path.resolve()))
    axes = own.pop("grid", {})
    _check_layer(path, own, axes)
    if own.get("kl_target", 0) is None:
        _check_rate_is_given(path, {**own, **axes}, settings)
    if PLUGINS in own:
        with raised_as(RecipeError, f"{path}: plugins: "):
            own[PLUGINS] = plugins.resolved(own[PLUGINS], path.parent)
    inherited = {name: values for name, values in grid.items() if name not in own}
    several = dict.fromkeys((*own, *axes))
    settings = {**left_by(several | own, settings), **own}
    return settings, {**left_by(several, inherited), **axes}


def _extended(path: Path, own: Mapping[str, Any]) -> Path | None:
    """The file that a recipe extends."""
    if "extends" not in own:
        return None
    neighbour = path.parent / str(own["extends"])
    with raised_as(RecipeError, f"{path}: extends: "):
        return neighbour if neighbour.is_file() else find(str(own["extends"]))


def set_by_users(path: Path) -> set[str]:
    """The fields that a readable recipe sets, or one that it extends, except for the recipes of this package."""
    if path.parent == FOLDER:
        return set()
    own = read_yaml(path)
    extended = _extended(path, own)
    return {*own} | (set_by_users(extended) if extended is not None else set())


def _check_layer(path: Path, own: dict[str, Any], axes: Any) -> None:
    """Raises RecipeError unless every field of a file is known, and has either a value or several in a grid."""
    if not isinstance(axes, dict) or not all(isinstance(values, list) and values for values in axes.values()):
        raise RecipeError(f"{path}: grid must hold 'field: [value, value, ...]' lines, got {axes!r}")
    for name in (*own, *axes):
        if name not in FIELDS and not (name in axes and field_of(str(name)) in DICTIONARIES):
            raise RecipeError(f"{path}: unknown field {name!r}{did_you_mean(str(name), FIELDS)}")
    if PLUGINS in axes:
        raise RecipeError(f"{path}: grid: plugins are imported before settings are read, and cannot vary")
    for name, value in own.items():
        if isinstance(value, list) and name not in LISTS:
            raise RecipeError(
                f"{path}: {name} takes one value, got a list: for several runs, write grid: {{{name}: {value}}}"
            )
    for name, values in axes.items():
        if any(isinstance(value, list) for value in values):
            raise RecipeError(f"{path}: grid cannot hold lists, and {name} has one: write a recipe for each of them")
    for name, (_, owned) in OWNERS.items():
        if name in axes and owned in own:
            raise RecipeError(
                f"{path}: {owned} are of one {name}, and the grid has several: write {owned}.NAME: [value] into grid"
            )
    if both := sorted(set(own) & set(axes)):
        raise RecipeError(f"{path}: {both[0]} has a value and a grid: leave one of them out")


def _check_rate_is_given(path: Path, above: Mapping[str, object], below: Mapping[str, Any]) -> None:
    """Raises RecipeError if a layer takes a KL target away and leaves the rate at which its search would begin."""
    if "learning_rate" not in above and below.get("kl_target") is not None:
        raise RecipeError(
            f"{path}: kl_target: null would leave the rate of {below.get('learning_rate')} at which its search begins: "
            "set a learning_rate, which alone takes the target away"
        )


def left_by(above: Mapping[str, object], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a layer that the layer above does not replace.

    Args:
        above: The fields of the layer above. With the value of another surrogate or task, the settings of the one below
            are not inherited; None stands for values that are not known. A learning rate of its own is meant as one,
            so a KL target, which would only begin there, is not inherited either.
        settings: The settings below.
    """
    replaced = ROLLOUT_LENGTH if ROLLOUT_LENGTH & above.keys() else frozenset()
    if "learning_rate" in above:
        replaced |= {"kl_target"}
    for name, (default, owned) in OWNERS.items():
        given = above.get(name)
        if given is not None and settings.get(name, default) != given:
            replaced |= {owned}
    return {name: value for name, value in settings.items() if name not in replaced}


@dataclass(frozen=True)
class Overrides:
    """Settings of a command, over those of its recipe.

    Attributes:
        words: The words for TRL's parser.
        given: The value of each of their fields, None for a flag.
        inner: Settings inside dictionaries, by `field.name`.
        plugins: The plugins; None if the command names none.
    """

    words: list[str]
    given: dict[str, str | None]
    inner: dict[str, Any]
    plugins: list[str] | None

    @property
    def fields(self) -> set[str]:
        """All fields that the command sets, wholly or in part."""
        return {*self.given, *map(field_of, self.inner)}


def split(overrides: Sequence[str]) -> Overrides:
    """Takes the words of a command apart.

    Raises:
        RecipeError: If a value is missing or cannot be read, or a setting inside a dictionary is in no dictionary.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{PLUGINS}", nargs="*")
    named, others = parser.parse_known_args(overrides)
    words, rest, given, inner = deque(others), list[str](), dict[str, str | None](), dict[str, Any]()
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        found = value if equals else words[0] if words and not words[0].startswith("--") else None
        if "." not in name:
            if name == "resume_from_checkpoint" and found is None:
                rest.append(f"{word}=last")  # TRL's parser wants a value
            elif name in DICTIONARIES and found is not None and found.startswith("{"):
                rest.append(f"--{name}={json.dumps(dictionary(name, found))}")  # its classes read JSON only
                if not equals:
                    words.popleft()
            else:
                rest.append(word)
            # The parser also takes `--no_field`.
            given[name if name in FIELDS else name.removeprefix("no_")] = found
            continue
        if field_of(name) not in DICTIONARIES:
            raise RecipeError(f"unknown argument '--{name}'{did_you_mean(field_of(name), DICTIONARIES, prefix='--')}")
        if found is None:
            raise RecipeError(f"--{name} needs a value")
        if not equals:
            words.popleft()
        with raised_as(RecipeError, f"--{name}: "):
            inner[name] = read_value(found)
    if both := [name for name in inner if field_of(name) in given]:
        raise RecipeError(f"--{field_of(both[0])} and --{both[0]} set the same dictionary: give one of the two")
    return Overrides(rest, given, inner, named.plugins)


def load_plugins(path: Path, of_recipe: Sequence[str], given: Sequence[str] | None) -> list[str]:
    """Imports the plugins of a recipe, or those that a command gives in their place.

    Args:
        path: The recipe's file, for errors.
        of_recipe: Its `plugins`, from `read`.
        given: Those of the command, relative to the current folder; None if it gives none.

    Returns:
        The plugins, as a run's settings name them.

    Raises:
        RecipeError: If one cannot be imported, or registers nothing.
    """
    with raised_as(RecipeError, f"{path}: plugins: " if given is None else "--plugins: "):
        names = list(of_recipe) if given is None else plugins.resolved(list(given), Path())
        plugins.load(names)
    return names
