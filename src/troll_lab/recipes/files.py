"""Recipes as files: found by name or by path, and read with all that they extend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from troll.settings import did_you_mean
from troll_lab import plugins
from troll_lab.recipes.fields import DICTIONARIES, FIELDS, LISTS, PLUGINS, ROLLOUT_LENGTH, RecipeError, field_of
from troll_lab.terminal import UsageError
from troll_lab.trl import LabConfig
from troll_lab.values import read_yaml

FOLDER = Path(__file__).parent
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


def read(name_or_path: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Reads a recipe with all it extends.

    Args:
        name_or_path: The recipe's name, or the path of its file.

    Returns:
        Its fields, and its grid: the values of every field in which several runs differ, empty for a single run.

    Raises:
        RecipeError: If the recipe or a field is unknown, or the file is not a recipe.
    """
    return read_file(find(name_or_path))


def read_file(path: Path, below: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """As `read`, for the file of a recipe that the files `below` extend."""
    if path.resolve() in below:
        raise RecipeError(f"{path} extends itself")
    try:
        own = read_yaml(path)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    if "extends" in own:
        settings, grid = read_file(_extended(path, own.pop("extends")), (*below, path.resolve()))
    axes = own.pop("grid", {})
    if not isinstance(axes, dict) or not all(isinstance(values, list) and values for values in axes.values()):
        raise RecipeError(f"{path}: grid must hold 'field: [value, value, ...]' lines, got {axes!r}")
    for name in (*own, *axes):
        if name not in FIELDS and not (name in axes and field_of(str(name)) in DICTIONARIES):
            raise RecipeError(f"{path}: unknown field {name!r}{did_you_mean(str(name), FIELDS)}")
    if PLUGINS in axes:
        raise RecipeError(f"{path}: grid: plugins are imported before settings are read, and cannot vary")
    if PLUGINS in own:
        own[PLUGINS] = _resolved(own[PLUGINS], path.parent, f"{path}: plugins")
    for name, value in own.items():
        if isinstance(value, list) and name not in LISTS:
            raise RecipeError(
                f"{path}: {name} takes one value, got a list: for several runs, write grid: {{{name}: {value}}}"
            )
    for name, values in axes.items():
        if any(isinstance(value, list) for value in values):
            raise RecipeError(f"{path}: grid cannot hold lists, and {name} has one: write a recipe for each of them")
    if both := sorted(set(own) & set(axes)):
        raise RecipeError(f"{path}: {both[0]} has a value and a grid: leave one of them out")
    inherited = {name: values for name, values in grid.items() if name not in own}
    above = {*own, *axes}
    settings = {**left_by(above, settings, own.get("surrogate")), **own}
    return settings, {**left_by(above, inherited), **axes}


def left_by(above: Collection[str], settings: dict[str, Any], surrogate: object = None) -> dict[str, Any]:
    """The settings of a layer that the fields of the layer above do not replace.

    Args:
        above: The fields of the layer above.
        settings: The settings below.
        surrogate: The surrogate of the layer above; with another one, a surrogate's own settings are not inherited.
    """
    replaced = ROLLOUT_LENGTH if ROLLOUT_LENGTH & set(above) else frozenset()
    if surrogate is not None and settings.get("surrogate", LabConfig.surrogate) != surrogate:
        replaced |= {"surrogate_kwargs"}
    return {name: value for name, value in settings.items() if name not in replaced}


def _extended(path: Path, name: object) -> Path:
    neighbour = path.parent / str(name)
    try:
        return neighbour if neighbour.is_file() else find(str(name))
    except RecipeError as error:
        raise RecipeError(f"{path}: extends: {error}") from error


def _resolved(names: Any, folder: Path, label: str) -> list[str]:
    try:
        return plugins.resolved(names, folder)
    except UsageError as error:
        raise RecipeError(f"{label}: {error}") from error


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
    label = f"{path}: plugins" if given is None else "--plugins"
    names = list(of_recipe) if given is None else _resolved(list(given), Path(), label)
    try:
        plugins.load(names)
    except UsageError as error:
        raise RecipeError(f"{label}: {error}") from error
    return names
