"""Settings of a part of the trainer that a configuration holds as a dictionary: `surrogate_kwargs`, `critic_kwargs`.

Each part has a frozen dataclass, whose fields say what they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from numbers import Real
from typing import Any, TypeVar

from troll.terminal import did_you_mean

T = TypeVar("T")

#: What a number may be.
RANGES: dict[str, Callable[[Any], bool]] = {
    "above 0": lambda value: value > 0,
    "above 1": lambda value: value > 1,
    "finite and above 0": lambda value: 0 < value < math.inf,
    "finite and at least 0": lambda value: 0 <= value < math.inf,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in (0, 1]": lambda value: 0 < value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


def number(default: float | None, takes: str) -> Any:
    """A field of a settings class that holds a number; with the default None, also None.

    Args:
        default: The field's value if none is given.
        takes: A key of `RANGES`.
    """
    return field(default=default, metadata={"takes": takes, "holds": RANGES[takes], "type": Real})


def flag(default: bool) -> Any:
    """A field of a settings class that is true or false."""
    return field(default=default, metadata={"takes": "true or false", "holds": lambda value: True, "type": bool})


def count(default: int) -> Any:
    """A field of a settings class that holds an integer, at least 0."""
    takes = "an integer, at least 0"
    return field(default=default, metadata={"takes": takes, "holds": lambda value: value >= 0, "type": int})


def choice(default: str, known: Sequence[str]) -> Any:
    """A field of a settings class that holds one of several words."""
    takes = f"one of {', '.join(known)}"
    return field(default=default, metadata={"takes": takes, "holds": lambda value: value in known, "type": str})


def parse(kind: type[T], given: Any, name: str, owner: str) -> T:
    """The settings of a part.

    Args:
        kind: Its settings class.
        given: The values by field, as a user gave them; None for the defaults.
        name: The configuration's name of the dictionary, for errors.
        owner: The part, for errors, such as "surrogate 'kl_penalty'".

    Raises:
        ValueError: If `given` is no dictionary, has an unknown field, or a value is not what its field takes.
    """
    if not isinstance(given, dict | None):
        raise ValueError(f"{name} must be a JSON object, got {given!r}")
    values, known = dict(given or {}), {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for field_name, value in list(values.items()):
        if field_name not in known:
            raise ValueError(f"{name}: {owner} has no setting {field_name!r}{_hint(str(field_name), list(known))}")
        entry = known[field_name]
        if not entry.metadata or (value is None and entry.default is None):
            continue
        kind_of_value = entry.metadata["type"]
        right_type = isinstance(value, kind_of_value) and (isinstance(value, bool) == (kind_of_value is bool))
        if not (right_type and entry.metadata["holds"](value)):
            raise ValueError(f"{name}: {field_name} of {owner} must be {entry.metadata['takes']}, got {value!r}")
        if kind_of_value is Real:
            values[field_name] = float(value)
    return kind(**values)


def _hint(name: str, known: Sequence[str]) -> str:
    if hint := did_you_mean(name, known):
        return hint
    return f"; it has {', '.join(known)}" if known else ", and none of its own"
