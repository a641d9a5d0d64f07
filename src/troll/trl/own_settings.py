"""Settings of a part of the trainer that a configuration holds as a dictionary: `surrogate_kwargs`, `critic_kwargs`.

Each part has a frozen dataclass, whose fields have the type `bool`, a `Literal` of words, or a `number`.
"""

from __future__ import annotations

from dataclasses import Field, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from troll.settings import did_you_mean
from troll.trl.ranges import RANGES, in_range
from troll.trust_region.checks import check_choice

T = TypeVar("T")


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
    check_choice("takes", takes, RANGES)
    return field(default=default, metadata={"takes": takes})


def parse(kind: type[T], given: Any, name: str, owner: str) -> T:
    """The settings of a part.

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
    for key, value in list(values.items()):
        if key not in known:
            hint = did_you_mean(str(key), list(known)) or (f"; it has {', '.join(known)}" if known else "")
            raise ValueError(f"{name}: {owner} has no setting {key!r}{hint or ', and none of its own'}")
        entry = known[key]
        takes, holds = _check(entry, hints[key], value)
        if not holds and not (value is None and entry.default is None):
            raise ValueError(f"{name}: {key} of {owner} must be {takes}, got {value!r}")
        if entry.metadata and isinstance(value, int) and not isinstance(entry.default, int):
            values[key] = float(value)
    return kind(**values)


def _check(entry: Field[Any], hint: Any, value: Any) -> tuple[str, bool]:
    """The values that a field takes, in words, and whether a value is one; without metadata, a field takes all."""
    if hint is bool:
        return "true or false", isinstance(value, bool)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}", value in get_args(hint)
    if not entry.metadata:
        return "", True
    takes = entry.metadata["takes"]
    return takes, in_range(value, takes)
