"""The grid of a comparison: recipes times the values of some fields, as single runs with readable names, on record."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from troll.files import json_text, read_json, write_atomically
from troll.trl.surrogates import MEASURING, SURROGATES
from troll_lab import recipes
from troll_lab.lock import ANOTHER_FOLDER
from troll_lab.recipes import Recipe, RecipeError
from troll_lab.runs.recorded import MANIFEST
from troll_lab.terminal import raised_as
from troll_lab.trl import LabConfig

#: The values of each field, as on the command line; none for a flag such as `--use_cpu`.
Axes = Mapping[str, Sequence[str]]
#: The value of each field of a run; None for a flag.
Assignment = Mapping[str, str | None]

_PER_RUN = ("output_dir", "resume_from_checkpoint")  # set by the comparison itself


@dataclass(frozen=True)
class PlannedRun:
    """One run of the grid.

    Attributes:
        name: The name of its folder: the recipe and the fields that the grid varies.
        recipe: The recipe with its overrides, loaded and therefore valid.
        assignment: The fields of the command line and of the recipe's grid.
    """

    name: str
    recipe: Recipe
    assignment: Assignment

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments after `troll train RECIPE`, without the output folder."""
        return _overrides(self.assignment)

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings, without those of the folder: runs with equal settings are the same run."""
        return {name: value for name, value in recipes.plain(self.recipe).items() if name not in _PER_RUN}

    def with_values(self, values: Mapping[str, str]) -> PlannedRun:
        """The run of the same name with other values of some fields.

        Raises:
            RecipeError: If `troll_lab.recipes.load` refuses a value.
        """
        assignment = {**self.assignment, **values}
        return PlannedRun(self.name, recipes.load(self.recipe.given, _overrides(assignment)), assignment)


@dataclass(frozen=True)
class Command:
    """The options of `troll compare`; `jobs` is None for the machine's default."""

    axes: Axes
    output_dir: str
    jobs: int | None


def parse_command(recipe_names: Sequence[str], arguments: Sequence[str]) -> Command:
    """Reads `--field value value ...`, the arguments after the recipes, which name the default output folder.

    `--seeds N` becomes the seeds 0 to N − 1.

    Raises:
        RecipeError: If a field is given twice, or the number of seeds or jobs is not a whole number above 0.
    """
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            if name in axes:
                raise RecipeError(f"--{name} is given twice: give all its values to one")
            axes[name] = [value] if equals else []
        else:
            axes[name].append(argument)
    if (seeds := _count(axes, "seeds")) is not None:
        if "seed" in axes:
            raise RecipeError("--seeds N runs the seeds 0 to N - 1, and --seed names them: give one of the two")
        axes["seed"] = [str(seed) for seed in range(seeds)]
    jobs = _count(axes, "jobs")
    stems = dict.fromkeys(recipes.name_of(Path(name)) for name in recipe_names)
    folders = axes.pop("output_dir", ["runs/compare-" + "-".join(stems)[:60]])
    if len(folders) != 1:
        raise RecipeError(f"--output_dir takes one folder, got {' '.join(folders) or 'nothing'}")
    return Command(axes, folders[0], jobs)


def _count(axes: dict[str, list[str]], name: str) -> int | None:
    if name not in axes:
        return None
    given = axes.pop(name)
    if len(given) != 1 or not given[0].isdecimal() or int(given[0]) < 1:
        raise RecipeError(f"--{name} takes one whole number above 0, got {' '.join(given) or 'nothing'}")
    return int(given[0])


def expand(recipe_names: Sequence[str], axes: Axes) -> list[PlannedRun]:
    """Makes the runs of a grid, all of them valid.

    Recipes, with their own `grid`, are multiplied by the axes, which override it. A field that only some surrogates
    read does not multiply the runs of the others. The runs are in the order in which a comparison should make them: all
    runs of the first seed come first, so that an interrupted comparison can be read.

    Args:
        recipe_names: Names or paths of recipes.
        axes: The axes from `parse_command`. Fields with one value, or none, are plain overrides.

    Raises:
        RecipeError: If `troll_lab.recipes.load` refuses a run, two runs are the same, or a field that takes a list has
            several values.
    """
    if "resume_from_checkpoint" in axes:
        raise RecipeError("--resume_from_checkpoint is for troll train: a comparison resumes by itself")
    for name, values in axes.items():
        if name in recipes.LISTS and len(values) > 1:
            raise RecipeError(f"--{name} takes a list, and a command can give it only one value: write it in a recipe")
    planned: dict[str, PlannedRun] = {}
    same: dict[str, str] = {}  # settings to the name of the run that has them
    points = [(name, *point) for name in dict.fromkeys(recipe_names) for point in _points(name, axes)]
    seeds = list(dict.fromkeys(assignment.get("seed") for _, assignment, _ in points))
    for recipe_name, assignment, labels in sorted(points, key=lambda point: seeds.index(point[1].get("seed"))):
        overrides = _overrides(assignment)
        recipe = recipes.load(recipe_name, overrides)
        name = "-".join([recipe.name, *labels])
        if name in planned:  # recipes with the same file name, or values that differ in characters a folder cannot have
            name += "-" + hashlib.sha256(json.dumps([recipe_name, overrides]).encode()).hexdigest()[:8]
        planned[name] = PlannedRun(name, recipe, assignment)
        settings = json.dumps(planned[name].settings, sort_keys=True)
        if settings in same:
            raise RecipeError(f"{same[settings]} and {name} are the same run: leave one of them out")
        same[settings] = name
    return list(planned.values())


def _points(recipe_name: str, axes: Axes) -> Iterator[tuple[Assignment, list[str]]]:
    """The assignments of a recipe's runs, each with the parts of its name."""
    fields, grid = recipes.read(recipe_name)
    # The surrogates decide which runs there are.
    recipes.load_plugins(recipes.find(recipe_name), fields.get(recipes.PLUGINS, []), axes.get(recipes.PLUGINS))
    own_axes = {name: [recipes.as_argument(value) for value in values] for name, values in grid.items()}
    given_values: dict[str, Sequence[str]] = own_axes | dict(axes)
    # A name begins with the surrogate and ends with the seed, in any order of the command.
    order = sorted(given_values, key=lambda name: (name != "surrogate", name == "seed", name))
    values = {name: given_values[name] for name in order}
    surrogates = values.get("surrogate") or [str(fields.get("surrogate", LabConfig.surrogate))]
    seen = set()
    for combination in product(*(given or (None,) for given in values.values())):
        assignment = dict(zip(values, combination, strict=True))
        unread = _unread(assignment.get("surrogate") or surrogates[0], surrogates, values)
        if _measures(assignment, fields):
            unread -= {*MEASURING}
        # A field of the recipe's grid needs some value, even if it is not read.
        assignment = {
            name: values[name][0] if name in unread else value
            for name, value in assignment.items()
            if name not in unread or (name in grid and name in recipes.FIELDS)
        }
        if tuple(assignment.items()) in seen:
            continue
        seen.add(tuple(assignment.items()))
        varied = [(name, value) for name, value in assignment.items() if len(values[name]) > 1 and name not in unread]
        yield assignment, [_readable(name, str(value)) for name, value in varied]


def _overrides(assignment: Assignment) -> tuple[str, ...]:
    # In one word, since a value such as -1e-3 would be taken for an option.
    return tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in assignment.items())


def _unread(surrogate: str, all_surrogates: Sequence[str], values: Axes) -> set[str]:
    """The fields in which this surrogate's runs do not differ: it sets them, or only other surrogates read them."""
    if surrogate not in SURROGATES:
        return set()  # loading the recipe will raise
    listed = {field for entry in SURROGATES.values() for field in entry.reads}
    present = {field for name in all_surrogates if name in SURROGATES for field in SURROGATES[name].reads}
    foreign = (listed - set(SURROGATES[surrogate].reads)) | set(SURROGATES[surrogate].sets)
    # A value that no surrogate of the grid reads stays: the configuration may refuse it.
    return {field for field, given in values.items() if field in foreign and (len(given) > 1 or field in present)}


def _measures(assignment: Assignment, fields: Mapping[str, Any]) -> bool:
    """Whether updates measure distributions with any surrogate."""
    inherited = recipes.left_by(assignment, dict(fields))
    for name in ("kl_target", "truncated_ratio"):
        value = assignment.get(name, inherited.get(name))
        bare = name in assignment and value is None  # a flag without a value is true
        if bare or str(value).lower() not in ("none", "null", "false"):
            return True
    return False


def _readable(name: str, value: str) -> str:
    value = re.sub(r"[^\w.+-]+", "_", value)[:40]
    return value if name == "surrogate" else f"{name.rpartition('.')[2]}={value}"


def claim(
    folder: Path, command: str | None, runs: Sequence[PlannedRun], settled: Sequence[str] = ()
) -> list[PlannedRun]:
    """Writes the manifest of a comparison: its command and the settings of every run.

    The `settled` fields are those whose values were chosen for each method.

    Returns:
        The runs. A recorded one keeps its name, which has fewer fields if the grid was smaller.

    Raises:
        RecipeError: If the folder holds a run that is not in the grid.
    """
    names: dict[str, str] = {}  # of recorded runs, by their names in this grid
    for name, settings in _recorded(folder).items():
        likely = sorted(runs, key=lambda run: run.name != name)  # the first is the usual case
        same = next((run.name for run in likely if not recipes.differences(settings, run.settings)), None)
        if same is None:
            closest = min((recipes.differences(settings, run.settings) for run in likely), key=len)
            raise RecipeError(
                f"{folder} holds another comparison: its run {name} is not in this grid ({closest[0]}); "
                f"{ANOTHER_FOLDER}"
            )
        if same == name or same not in names:
            names[same] = name
    named = [replace(run, name=names.get(run.name, run.name)) for run in runs]
    if len({run.name for run in named}) < len(named):
        raise RecipeError(f"{folder} holds other runs of these names: {ANOTHER_FOLDER}")
    content = {
        "command": command,
        "settled": list(settled),
        "recipes": {run.name: run.recipe.name for run in named},
        "runs": {run.name: run.settings for run in named},
    }
    write_atomically(folder / MANIFEST, json_text(content, indent=2) + "\n")
    return named


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of the recorded runs by name; empty before the manifest is written."""
    manifest = folder / MANIFEST
    with raised_as(RecipeError):
        recorded: Any = read_json(manifest).get("runs") if manifest.is_file() else {}
    if not isinstance(recorded, dict) or not all(isinstance(settings, dict) for settings in recorded.values()):
        raise RecipeError(f"{manifest} is not the manifest of a comparison: {ANOTHER_FOLDER}")
    return recorded
