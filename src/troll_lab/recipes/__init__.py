"""Recipes: YAML files with every setting of a run, found by name or by path.

A recipe has fields of `troll_lab.tasks.TaskConfig`, `troll_lab.trl.LabConfig` and `trl.ModelConfig`; other fields have
their defaults. It may have three more keys: `extends: RECIPE` (a name, or a path relative to the file) adds the fields
of another recipe that the file does not set; `grid: {field: [values]}` makes it an ablation for `troll compare`; and
`plugins: [FILE.py, module]` (files relative to the recipe) are imported before settings are read, and register
surrogates of the user, for example. To add a recipe, add a file to this folder.

A setting in a field with a dictionary is `field.name` on the command line and in a grid, such as
`--surrogate_kwargs.weight 0.3`; the other settings of the dictionary do not change.

Values are read as YAML 1.2 reads them, in recipes and on the command line: `1e-5`, `.5` and `+1e-3` are numbers, `no`
is a text, and a dictionary may be written `{top_p: .9}` or as JSON. A key that is there twice is an error.

`use_vllm: true` in a recipe applies where vLLM is installed and there is a GPU. Elsewhere transformers generates,
`generation_chunk_size` completions at a time; the command says so, and the run's settings have `use_vllm: false`. With
`--use_vllm true` on the command line vLLM generates on a CPU too, and it is an error if it is not installed.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from trl import ModelConfig, TrlParser

import troll_lab.rivals  # noqa: F401 (its surrogates must be registered before settings are read)
from troll.files import flat, json_text, write_atomically
from troll.settings import did_you_mean
from troll.trl import TrollConfig
from troll.trl.surrogates import SURROGATES
from troll_lab import plugins
from troll_lab.evaluation.vllm import vllm_is_usable
from troll_lab.tasks import TaskConfig
from troll_lab.tasks.registry import json_object
from troll_lab.terminal import UsageError, first_sentence, one_line
from troll_lab.trl import LabConfig
from troll_lab.values import NEGATIVE, number, read_value, read_yaml, whole_number, yaml_text

FOLDER = Path(__file__).parent
CONFIGS = (TaskConfig, LabConfig, ModelConfig)
_FIELDS: dict[str, Field[Any]] = {field.name: field for config in CONFIGS for field in fields(config) if field.init}
#: The key of the files and modules that are imported before settings are read.
PLUGINS = "plugins"
FIELDS = frozenset(_FIELDS) | {PLUGINS}


def _takes(kind: type, hint: Any) -> bool:
    """Whether a type is of a kind, such as `list`, or a union with one."""
    return kind in (hint, get_origin(hint)) or (
        get_origin(hint) in (Union, UnionType) and any(_takes(kind, part) for part in get_args(hint))
    )


_HINTS = {name: hint for config in CONFIGS for name, hint in get_type_hints(config).items() if name in FIELDS}
#: Fields whose value is a list, so that several values on the command line are not an axis of a grid.
LISTS = frozenset(name for name, hint in _HINTS.items() if _takes(list, hint)) | {PLUGINS}
#: Fields with a dictionary, whose settings are named `field.name`.
DICTIONARIES = frozenset(name for name, hint in _HINTS.items() if _takes(dict, hint))


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """The function that reads a field's number, or each number of its list; None for a field of another type."""
    parts = {*(get_args(hint) or [hint])} - {type(None)}
    if len(parts) == 1 and get_origin(part := next(iter(parts))) is list:
        parts = {*get_args(part)}
    if not parts <= {int, float}:
        return None
    return whole_number if parts == {int} else number


_READERS = {name: reader for name, hint in _HINTS.items() if (reader := _reader(hint)) is not None}
#: Fields that hold nothing but a text.
_TEXTS = frozenset(name for name, hint in _HINTS.items() if {str} == {*(get_args(hint) or [hint])} - {type(None)})
#: Fields that are true or false.
_FLAGS = frozenset(name for name, hint in _HINTS.items() if {bool} == {*(get_args(hint) or [hint])} - {type(None)})

#: Alternative settings of the number of updates per rollout. The one that is set last counts.
_ROLLOUT_LENGTH = frozenset({"updates_per_rollout", "steps_per_generation", "generation_batch_size"})

_SURROGATE_KWARGS = "surrogate_kwargs"

#: The fields that are ours, or whose default is.
_OWN_FIELDS = TrollConfig.__annotations__.keys() | LabConfig.__annotations__.keys()

#: The file in which a run keeps its resolved settings, itself a recipe.
CONFIG_FILE = "config.yaml"


class RecipeError(UsageError):
    """A recipe or setting that cannot be used."""


@dataclass
class Recipe:
    """A recipe with its overrides, parsed.

    Attributes:
        given: The name or path that the user gave.
        name: The name from `name_of`.
        settings: The fields that the recipe and the command line set, in the form that `save` writes.
        task: The data set, its prompts and its rewards.
        training: The trainer's configuration.
        model: The model to train, and whether by LoRA.
        note: Lines for the user about what this machine lacks for the recipe; None if it lacks nothing.
    """

    given: str
    name: str
    settings: dict[str, Any]
    task: TaskConfig
    training: LabConfig
    model: ModelConfig
    note: str | None = None


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
    return _read(find(name_or_path), ())


def _read(path: Path, below: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    if path.resolve() in below:
        raise RecipeError(f"{path} extends itself")
    try:
        own = read_yaml(path)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    if "extends" in own:
        settings, grid = _read(_extended(path, own.pop("extends")), (*below, path.resolve()))
    axes = own.pop("grid", {})
    if not isinstance(axes, dict) or not all(isinstance(values, list) and values for values in axes.values()):
        raise RecipeError(f"{path}: grid must hold 'field: [value, value, ...]' lines, got {axes!r}")
    for name in (*own, *axes):
        if name not in FIELDS and not (name in axes and _field_of(str(name)) in DICTIONARIES):
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
    if "surrogate" in own:
        _drop_foreign_kwargs(settings, own["surrogate"])
    return {**_without_replaced(settings, {*own, *axes}), **own}, {
        **_without_replaced(inherited, {*own, *axes}),
        **axes,
    }


def _without_replaced(settings: dict[str, Any], above: Collection[str]) -> dict[str, Any]:
    """Leaves out settings that a layer above replaces by another setting of the same thing."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _ROLLOUT_LENGTH or not _ROLLOUT_LENGTH & set(above)
    }


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


def load(name_or_path: str, overrides: Sequence[str] = (), vllm: bool | None = None) -> Recipe:
    """Reads a recipe and applies `--field value` pairs on top.

    Args:
        name_or_path: The recipe's name, or the path of its file.
        overrides: The pairs, as on the command line.
        vllm: Whether vLLM can run where the recipe will be used; by default, whether it can on this machine.

    Returns:
        The recipe, with `use_vllm` off where vLLM cannot run.

    Raises:
        RecipeError: If the recipe or a field is unknown, a value does not fit its field, the overrides do not pick one
            point of a grid, or they ask for vLLM where it is not installed.
    """
    path = find(name_or_path)
    settings, grid = _read(path, ())
    overrides, given_plugins = _without_plugins(overrides)
    loaded = load_plugins(path, settings.pop(PLUGINS, []), given_plugins)
    arguments, values_given, inner = _split(overrides)
    given = set(values_given)
    settings = _without_replaced(settings, given)
    if "surrogate" in given:
        _drop_foreign_kwargs(settings, values_given["surrogate"])
    for name, value in inner.items():
        field = _field_of(name)
        if field in given:
            raise RecipeError(f"--{field} and --{name} set the same dictionary: give one of the two")
        below = settings.get(field) or {}
        below = _dictionary(field, below) if isinstance(below, str) else below
        settings[field] = {**below, name.partition(".")[2]: value}
    given |= {_field_of(name) for name in inner}
    on_cpu = vllm is None and not torch.accelerator.is_available()
    if on_cpu and "use_cpu" not in given and not settings.get("use_cpu"):
        _refuse_half_precision(path, settings, given)
    parser = _Parser(list(CONFIGS), allow_abbrev=False)
    parser.set_defaults_with_config(**parser.fitting(settings))
    try:
        task, training, model, unknown = parser.parse_args_into_dataclasses(
            args=arguments, return_remaining_strings=True
        )
    except (ValueError, TypeError, OverflowError) as error:  # the configurations' own validation
        raise RecipeError(one_line(error)) from error
    if unknown:
        field = unknown[0].removeprefix("--").split("=")[0]
        raise RecipeError(f"unknown argument {unknown[0]!r}{did_you_mean(field, FIELDS, prefix='--')}")

    plugin = plugins.plugin_of(training.surrogate)
    if plugin is not None and plugin not in loaded:  # of another recipe, and the run's own process will not know it
        raise RecipeError(f"{path}: surrogate {training.surrogate!r} is of {plugin}: name that in `plugins`")

    # A grid over the own settings of another surrogate is not open: this surrogate does not read them.
    unread = {name for entry in SURROGATES.values() for name in entry.reads} - {*SURROGATES[training.surrogate].reads}
    set_here = given | inner.keys() | {name for name in unread if _field_of(name) == _SURROGATE_KWARGS}
    if open_axes := [name for name in grid if name not in set_here]:
        raise RecipeError(
            f"{name_of(path)} is a grid over {', '.join(open_axes)}: run it with troll compare {name_or_path}, or give "
            f"each one value, as in --{open_axes[0]} {grid[open_axes[0]][0]}"
        )
    notes = [] if (line := _fit_to_rollouts(training, path, given, settings)) is None else [line]
    about = first_sentence(path.read_text())
    if on_cpu and not training.use_cpu and "GPU" in about:
        notes.append(f"{name_of(path)} is for a GPU, and torch finds none here: expect it to be slow ({about})")
    usable = vllm_is_usable() and not training.use_cpu if vllm is None else vllm
    if training.use_vllm and not usable and "use_vllm" in given:
        if find_spec("vllm") is None:  # its build for CPUs would do
            raise RecipeError("--use_vllm: vLLM is not installed here: install it, or leave the flag out")
    elif training.use_vllm and not usable:
        training.use_vllm = False
        chunk = training.generation_chunk_size or training.generation_batch_size
        notes.append(
            "use_vllm: vLLM is not installed here, or has no GPU, so transformers generates, at most "
            f"{chunk} completions at a time"
        )

    own = {field.name for field in fields(TaskConfig)} | _OWN_FIELDS
    if _ROLLOUT_LENGTH & (given | set(settings)):
        own -= _ROLLOUT_LENGTH  # what is derived would contradict a later change
    values = {field.name: getattr(config, field.name) for config in (task, training, model) for field in fields(config)}
    # The checkpoint that a run was resumed from is not one of its settings.
    names_set = sorted((given | own | set(settings)) - {"resume_from_checkpoint"})
    resolved = {name: values[name] for name in names_set if values.get(name) is not None or name in settings}
    if loaded:
        resolved[PLUGINS] = loaded
    return Recipe(name_or_path, name_of(path), resolved, task, training, model, "\n".join(notes) or None)


def _fit_to_rollouts(training: LabConfig, path: Path, given: Collection[str], settings: Collection[str]) -> str | None:
    """Rounds the steps between checkpoints and between logs up to whole rollouts, if the user has not set them.

    A run resumes exactly from the end of a rollout only. Defaults are rounded, and the values of recipes of this
    package, which do not know the length of a rollout that a command sets.

    Returns:
        A line for the user about logs without a reward; None if every log has one.
    """
    updates = training.rollout_steps // math.gcd(training.rollout_steps, training.gradient_accumulation_steps)
    for name in ("save_steps", "logging_steps"):
        steps = getattr(training, name)
        users = name in given or (name in settings and path.parent != FOLDER)
        if not users and steps >= 1:  # below, it is a fraction of the run
            setattr(training, name, math.ceil(steps / updates) * updates)
    steps = training.logging_steps
    if training.logging_strategy != "steps" or not 1 <= steps < updates:
        return None
    return (
        f"logging_steps {steps:g}: TRL logs the reward of a rollout once, in the first log after it was sampled, "
        f"so the others of its {updates} updates have none; with logging_steps {updates}, each log has one"
    )


def _refuse_half_precision(path: Path, settings: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuses a recipe for a GPU, which computes in 16 bits, where there is none and nobody asked for the CPU."""
    for name in ("bf16", "fp16"):
        if settings.get(name) is True and name not in given:
            raise RecipeError(
                f"{name_of(path)} is for a GPU ({name}: true), and torch finds none here; to train on the CPU all the "
                f"same, slowly, add --use_cpu --{name} false (recipes for a CPU: quickstart, open-text, smollm2-sums)"
            )


def save(recipe: Recipe, path: Path) -> None:
    """Writes the resolved settings as a recipe that `load` reads back."""
    lines = yaml_text(plain(recipe))
    comment = f"# {recipe.name}, resolved; train again with: troll train {path} --output_dir ANOTHER\n"
    write_atomically(path, comment + lines)


def plain(recipe: Recipe) -> dict[str, Any]:
    """The resolved settings, as values that YAML and JSON can hold."""
    return {name: _plain(value) for name, value in recipe.settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if hasattr(value, "to_dict"):  # accelerate's configuration
        return value.to_dict()
    return value.value if isinstance(value, Enum) else value


def differences(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], ignored: Callable[[str], bool] = lambda name: False
) -> list[str]:
    """The differences of two sets of settings; a field that one of them leaves out has its default there.

    Args:
        recorded: The settings that a file held.
        settings: The settings from `plain`.
        ignored: Whether differences in a field, given by its name, do not count.

    Returns:
        A phrase for each differing field, by name, such as "kl_bound is 0.05 there and 0.1 here".
    """
    # As JSON gives them back: with lists for tuples, and the word for an infinite bound.
    recorded, settings = (flat(json.loads(json_text(values))) for values in (recorded, settings))
    phrases = []
    for name in sorted({*recorded, *settings}):
        there, here = (values[name] if name in values else _default(name) for values in (recorded, settings))
        if there != here and not ignored(name):
            phrases.append(f"{name} is {as_argument(there)} there and {as_argument(here)} here")
    return phrases


def _default(name: str) -> Any:
    if name not in _FIELDS:
        return None
    value, factory = _FIELDS[name].default, _FIELDS[name].default_factory
    if value is MISSING:
        value = None if factory is MISSING else factory()
    return value.value if isinstance(value, Enum) else value


def as_argument(value: Any) -> str:
    """A YAML value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _field_of(name: str) -> str:
    """The field of `field.name`, or of a field's own name."""
    return name.partition(".")[0]


def _drop_foreign_kwargs(settings: dict[str, Any], surrogate: object) -> None:
    """Leaves out the own settings of the surrogate below, if another one takes its place."""
    if settings.get("surrogate", LabConfig.surrogate) != surrogate:
        settings.pop(_SURROGATE_KWARGS, None)


def _without_plugins(overrides: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Takes `--plugins NAME NAME` out of the words of a command; the names are None if it is not there."""
    rest, names, inside = list[str](), None, False
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            inside = name == PLUGINS
            if inside:
                names = [value] if equals else []
                continue
        if inside and names is not None:
            names.append(word)
        else:
            rest.append(word)
    return rest, names


def _split(overrides: Sequence[str]) -> tuple[list[str], dict[str, str | None], dict[str, Any]]:
    """Takes `--field value` pairs apart.

    Returns:
        The arguments for TRL's parser; the value of each of their fields, None for a flag; and the settings inside
        dictionaries, from `--field.name value`.
    """
    words, rest, given, inner = deque(overrides), list[str](), dict[str, str | None](), dict[str, Any]()
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
                rest.append(f"--{name}={json.dumps(_dictionary(name, found))}")  # its classes read JSON only
                if not equals:
                    words.popleft()
            else:
                rest.append(word)
            # The parser also takes `--no_field`.
            given[name if name in FIELDS else name.removeprefix("no_")] = found
            continue
        if _field_of(name) not in DICTIONARIES:
            raise RecipeError(f"unknown argument '--{name}'{did_you_mean(_field_of(name), DICTIONARIES, prefix='--')}")
        if found is None:
            raise RecipeError(f"--{name} needs a value")
        if not equals:
            words.popleft()
        try:
            inner[name] = read_value(found)
        except ValueError as error:
            raise RecipeError(f"--{name}: {error}") from error
    return rest, given, inner


def _dictionary(name: str, text: str) -> dict[str, Any]:
    try:
        return json_object(name, text)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _or_none(read: Callable[[str], Any], may_be_none: bool) -> Callable[[str], Any]:
    return lambda text: None if may_be_none and text.lower() in ("none", "null") else read(text)


class _Parser(TrlParser):
    """TRL's parser, whose numbers are read as those of recipes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = NEGATIVE
        for action in self._actions:
            if action.dest in _READERS:
                action.type = _or_none(_READERS[action.dest], type(None) in get_args(_HINTS[action.dest]))

    def fitting(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a recipe in the types of their fields; texts are read by the parser itself."""
        fitted = dict(settings)
        for name, value in settings.items():
            if isinstance(value, str):
                if name in DICTIONARIES and value.startswith("{"):
                    fitted[name] = _dictionary(name, value)
            elif value is None:
                continue
            elif name in _TEXTS:
                kind = "true or false" if isinstance(value, bool) else "a number"
                if isinstance(value, dict | list):
                    raise RecipeError(f"{name} takes a text, got {value!r}")
                raise RecipeError(f"{name} takes a text, and YAML reads {value!r} as {kind}: put it in quotes")
            elif name in _FLAGS:
                if value not in (True, False):  # 1 and 0 are equal to these
                    raise RecipeError(f"{name} must be true or false, got {value!r}")
                fitted[name] = bool(value)
            elif name in LISTS and isinstance(value, int | float):
                raise RecipeError(f"{name} takes a list, got {value!r}: write [{json.dumps(value)}]")
            elif name in _READERS:
                read = _READERS[name]
                try:
                    fitted[name] = [read(each) for each in value] if isinstance(value, list) else read(value)
                except ArgumentTypeError as error:
                    raise RecipeError(f"{name} {error}") from error
        return fitted

    def error(self, message: str) -> Any:
        # argparse would print the usage of several hundred fields.
        raise RecipeError(one_line(message))
