"""Settings of any kind: their help, the ranges of their numbers, and settings that arrive as a dictionary."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import Field, field, fields, is_dataclass
from numbers import Real
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def described(config: type[T]) -> type[T]:
    """A decorator: the entries of a dataclass's docstring become the help of its fields on the command line."""
    entries = re.findall(r"^    (\w+): (.+(?:\n        .+)*)", inspect.cleandoc(config.__doc__ or ""), re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    for entry in fields(config):  # type: ignore[arg-type]
        if entry.name in texts:
            entry.metadata = MappingProxyType({"help": texts[entry.name], **entry.metadata})
    return config


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of an error about an unknown name: a suggestion of the most similar known name, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""


def same_origin(one: Any, other: Any) -> bool:
    """Whether two functions are of one module: it may have run again, as a cell of a notebook does."""
    named = hasattr(one, "__qualname__") and hasattr(other, "__qualname__")  # other objects have their class's module
    return named and one.__module__ == other.__module__


#: vLLM's lowest temperature: it samples at this one where a lower one is set, and takes the most likely token at 0.
VLLM_LEAST_TEMPERATURE = 0.01

#: The ranges of numbers, by the words that error messages use.
RANGES: dict[str, Callable[[Any], bool]] = {
    "above 0": lambda value: value > 0,
    "above 1": lambda value: value > 1,
    "at least 0": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "finite": math.isfinite,
    "finite and above 0": lambda value: 0 < value < math.inf,
    "finite and at least 0": lambda value: 0 <= value < math.inf,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "an integer, at least 0": lambda value: isinstance(value, int) and value >= 0,
    "an integer, at least 1": lambda value: isinstance(value, int) and value >= 1,
    "an integer, at least 1, or -1": lambda value: isinstance(value, int) and (value >= 1 or value == -1),
    "an integer in [0, 2^32)": lambda value: isinstance(value, int) and 0 <= value < 2**32,
}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


#: The types of settings that are not numbers: their values in the words of error messages, and whether a value is one.
TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a text", lambda value: isinstance(value, str)),
    list[str]: ("a list of texts", _are_texts),
    list[tuple[str, str]]: (  # in JSON and YAML, a pair is a list
        'a list of pairs of texts, such as [["3 + 4 =", "7"]]',
        lambda value: isinstance(value, list) and all(_are_texts(each) and len(each) == 2 for each in value),
    ),
    dict[str, str]: (
        "a mapping of names, such as {prompt: question, answer: solution}",
        lambda value: isinstance(value, dict) and _are_texts([*value, *value.values()]),
    ),
    dict[str, Any]: ("a mapping", lambda value: isinstance(value, dict)),
}


def in_range(value: Any, takes: str) -> bool:
    """Whether a value is a number in a range, a key of `RANGES`."""
    return isinstance(value, Real) and not isinstance(value, bool) and RANGES[takes](value)


def check_number(name: str, value: Any, takes: str) -> None:
    """Raises ValueError unless a setting is a number in a range, a key of `RANGES`."""
    if not in_range(value, takes):
        raise ValueError(f"{name} must be {takes}, got {value!r}")


def number(default: float | None, takes: str) -> Any:
    """A field of settings that holds a number.

    Args:
        default: The default. With None, the field also takes None.
        takes: The range, in the words of `RANGES`, such as "finite and above 0" or "in (0, 1]".

    Returns:
        The field, for the body of a dataclass: `threshold: float = number(0.1, "finite and above 0")`.

    Raises:
        ValueError: If the range is unknown.
    """
    if takes not in RANGES:
        raise ValueError(f"takes must be one of {', '.join(RANGES)}, got {takes!r}")
    return field(default=default, metadata={"takes": takes})


def check_fields(settings: Any) -> None:
    """Raises ValueError unless each field of a dataclass's instance has a value that it takes, as in `parse`."""
    hints = get_type_hints(type(settings))
    for entry in fields(settings):
        _check(entry.name, entry, hints[entry.name], getattr(settings, entry.name))


def parse(kind: type[T], given: Any, name: str, owner: str) -> T:
    """The settings of a part.

    A `number` takes values in its range, and 1e3 for the integer 1000. A field whose type is one of `TYPES` or a
    `Literal` takes values of this type, and one whose type is a dataclass a dictionary of its settings. None is taken
    if it is the default or part of the type. Other fields take everything.

    Args:
        kind: Its dataclass.
        given: The values by field, as a user gave them; None for the defaults.
        name: The configuration's name of the dictionary, for errors.
        owner: The part, for errors, such as "surrogate 'kl_penalty'".

    Raises:
        ValueError: If `given` is not a dictionary, or has an unknown field or a value that its field does not take.
    """
    if not isinstance(given, dict | None):
        raise ValueError(f"{name} must be a JSON object, got {given!r}")
    values, known = dict(given or {}), {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(str(key), list(known)) or (f"; it has {', '.join(known)}" if known else "")
            raise ValueError(f"{name}: {owner} has no setting {key!r}{hint or ', and none of its own'}")
        entry, type_ = known[key], _without_none(hints[key])
        if is_dataclass(type_) and value is not None:
            values[key] = parse(type_, value, f"{name}.{key}", owner)  # type: ignore[arg-type]
            continue
        if type_ is int and isinstance(value, float) and value.is_integer():
            values[key] = value = int(value)
        _check(f"{name}: {key} of {owner}", entry, hints[key], value)
        if type_ is float and entry.metadata and isinstance(value, int):
            values[key] = float(value)
    return kind(**values)


def _without_none(hint: Any) -> Any:
    """The type of a field's values other than None."""
    kinds = [each for each in get_args(hint) if each is not NoneType]
    return kinds[0] if NoneType in get_args(hint) and len(kinds) == 1 else hint


def _check(name: str, entry: Field[Any], hint: Any, value: Any) -> None:
    """Raises ValueError unless a field takes a value."""
    if value is None and (entry.default is None or NoneType in get_args(hint)):
        return
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        takes, holds = f"one of {', '.join(get_args(hint))}", value in get_args(hint)
    elif takes := entry.metadata.get("takes", ""):
        holds = in_range(value, takes)
    else:
        takes, is_one = TYPES.get(hint, ("", lambda value: True))
        holds = is_one(value)
    if not holds:
        raise ValueError(f"{name} must be {takes}, got {value!r}")
