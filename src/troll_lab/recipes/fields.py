"""The fields of a recipe: what each takes, and in which of them two runs differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import ModelConfig

import troll_lab.rivals  # noqa: F401 (its surrogates must be registered before settings are read)
from troll.files import flat, json_text
from troll.trl import TrollConfig
from troll_lab.tasks import TaskConfig
from troll_lab.tasks.registry import json_object
from troll_lab.terminal import UsageError, raised_as
from troll_lab.trl import LabConfig
from troll_lab.values import number, whole_number

CONFIGS = (TaskConfig, LabConfig, ModelConfig)
_FIELDS: dict[str, Field[Any]] = {field.name: field for config in CONFIGS for field in fields(config) if field.init}
#: The key of the files and modules that are imported before settings are read.
PLUGINS = "plugins"
FIELDS = frozenset(_FIELDS) | {PLUGINS}
#: The fields that are ours, or whose default is.
OWN_FIELDS = TrollConfig.__annotations__.keys() | LabConfig.__annotations__.keys()


def _kinds(hint: Any) -> set[Any]:
    """The types of a field without None, such as `int` and `float` for `int | float | None`."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    return {*parts} - {type(None)}


def _is(kind: Any, wanted: type) -> bool:
    return wanted in (kind, get_origin(kind))


def _reader(kinds: set[Any]) -> Callable[[Any], Any] | None:
    """The function that reads a field's number, or each number of its list; None for a field of another type."""
    if len(kinds) == 1 and _is(kind := next(iter(kinds)), list):
        kinds = {*get_args(kind)}
    if not kinds or not kinds <= {int, float}:
        return None
    return whole_number if kinds == {int} else number


_HINTS = {name: hint for config in CONFIGS for name, hint in get_type_hints(config).items() if name in FIELDS}
_KINDS = {name: _kinds(hint) for name, hint in _HINTS.items()}
#: Fields that may be None.
OPTIONAL = frozenset(name for name, hint in _HINTS.items() if type(None) in get_args(hint))
#: Fields whose value is a list, so that several values on the command line are not an axis of a grid.
LISTS = frozenset(name for name, kinds in _KINDS.items() if any(_is(kind, list) for kind in kinds)) | {PLUGINS}
#: Fields with a dictionary, whose settings are named `field.name`.
DICTIONARIES = frozenset(name for name, kinds in _KINDS.items() if any(_is(kind, dict) for kind in kinds))
#: What reads the numbers of each field that holds numbers.
READERS = {name: reader for name, kinds in _KINDS.items() if (reader := _reader(kinds)) is not None}
#: Fields that hold nothing but a text, and those that are true or false.
TEXTS = frozenset(name for name, kinds in _KINDS.items() if kinds == {str})
FLAGS = frozenset(name for name, kinds in _KINDS.items() if kinds == {bool})

#: Alternative settings of the number of updates per rollout. The one that is set last counts.
ROLLOUT_LENGTH = frozenset({"updates_per_rollout", "steps_per_generation", "generation_batch_size"})


class RecipeError(UsageError):
    """A recipe or setting that cannot be used."""


def field_of(name: str) -> str:
    """The field of `field.name`, or of a field's own name."""
    return name.partition(".")[0]


def default(name: str) -> Any:
    """The default of a field, as YAML and JSON hold it; None for a name that is not a field."""
    if name not in _FIELDS:
        return None
    value, factory = _FIELDS[name].default, _FIELDS[name].default_factory
    if value is MISSING:
        value = None if factory is MISSING else factory()
    return value.value if isinstance(value, Enum) else value


def dictionary(name: str, text: str) -> dict[str, Any]:
    """The value of a field with a dictionary, from JSON.

    Raises:
        RecipeError: If the text is not a JSON object.
    """
    with raised_as(RecipeError):
        return json_object(name, text)


def differences(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], ignored: Callable[[str], bool] = lambda name: False
) -> list[str]:
    """The differences of two sets of settings; a field that one of them leaves out has its default there.

    Args:
        recorded: The settings that a file held.
        settings: The settings from `troll_lab.recipes.plain`.
        ignored: Whether differences in a field, given by its name, do not count.

    Returns:
        A phrase for each differing field, by name, such as "kl_bound is 0.05 there and 0.1 here".
    """
    # As JSON gives them back: with lists for tuples, and the word for an infinite bound.
    recorded, settings = (flat(json.loads(json_text(values))) for values in (recorded, settings))
    phrases = []
    for name in sorted({*recorded, *settings}):
        there, here = (values[name] if name in values else default(name) for values in (recorded, settings))
        if there != here and not ignored(name):
            phrases.append(f"{name} is {as_argument(there)} there and {as_argument(here)} here")
    return phrases


def as_argument(value: Any) -> str:
    """A YAML value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
