"""The fields of a recipe: what each takes, and the parser that reads them."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import ModelConfig, TrlParser

import troll_lab.rivals  # noqa: F401 (its surrogates must be registered before settings are read)
from troll.settings import did_you_mean
from troll.trl import TrollConfig
from troll_lab.tasks import TaskConfig
from troll_lab.tasks.registry import json_object
from troll_lab.terminal import UsageError, one_line
from troll_lab.trl import LabConfig
from troll_lab.values import NEGATIVE, number, whole_number

CONFIGS = (TaskConfig, LabConfig, ModelConfig)
_FIELDS: dict[str, Field[Any]] = {field.name: field for config in CONFIGS for field in fields(config) if field.init}
#: The key of the files and modules that are imported before settings are read.
PLUGINS = "plugins"
FIELDS = frozenset(_FIELDS) | {PLUGINS}
#: The fields that are ours, or whose default is.
OWN_FIELDS = TrollConfig.__annotations__.keys() | LabConfig.__annotations__.keys()


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
ROLLOUT_LENGTH = frozenset({"updates_per_rollout", "steps_per_generation", "generation_batch_size"})


class RecipeError(UsageError):
    """A recipe or setting that cannot be used."""


def field_of(name: str) -> str:
    """The field of `field.name`, or of a field's own name."""
    return name.partition(".")[0]


def default(name: str) -> Any:
    """The default of a field, as YAML and JSON hold it; None for what is no field."""
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
    try:
        return json_object(name, text)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def parse(settings: Mapping[str, Any], words: Sequence[str]) -> tuple[TaskConfig, LabConfig, ModelConfig]:
    """Makes the configurations of a run.

    Args:
        settings: Fields and their values, as YAML reads them.
        words: `--field value` pairs, which come first.

    Raises:
        RecipeError: If a field is unknown, a value does not fit its field, or values do not go together.
    """
    parser = _Parser(list(CONFIGS), allow_abbrev=False)
    parser.set_defaults_with_config(**parser.fitting(settings))
    try:
        task, training, model, unknown = parser.parse_args_into_dataclasses(
            args=list(words), return_remaining_strings=True
        )
    except (ValueError, TypeError, OverflowError) as error:  # the configurations' own validation
        raise RecipeError(one_line(error)) from error
    if unknown:
        field = unknown[0].removeprefix("--").split("=")[0]
        raise RecipeError(f"unknown argument {unknown[0]!r}{did_you_mean(field, FIELDS, prefix='--')}")
    return task, training, model


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
                    fitted[name] = dictionary(name, value)
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
