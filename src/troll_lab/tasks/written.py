"""The numbers and dates of a JSON file as they are written there.

`datasets` reads a column with one fraction, or one integer of 2^63 and more, as 64-bit floats, which rounds long
numbers; and texts such as "2024-05-01" as points in time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

#: The digits up to which every Python makes an int of a text.
_LONGEST_INT = 640

_SPACE = re.compile(r"\s*")


class WrittenRows:
    """The rows of a JSON file, which is read again where a value may have been changed.

    Args:
        path: The file: objects one after another, or a list of objects.
        count: The number of rows that `datasets` has found in it.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._columns: dict[str, list[Any]] = {}

    def value(self, number: int, column: str) -> Any:
        """The value of a row, counted from 0, in a column, whose name may lead into nested ones.

        A number is an int, or a float if that is what is written, to the last digit; otherwise a Decimal.

        Raises:
            ValueError: If the file is not in the form that `path` may have.
        """
        if column not in self._columns:
            self._columns[column] = [value_at(row, column) for row in json_rows(self._path)]
            if len(self._columns[column]) != self._count:
                raise ValueError(f"{self._path} is neither JSON lines nor a list of objects")
        return self._columns[column][number]


def json_rows(path: Path) -> Iterator[Any]:
    """Yields the objects of a JSON file: one after another, or those of its list."""
    text = path.read_text(encoding="utf-8-sig")
    decoder = json.JSONDecoder(parse_float=_number, parse_int=_whole)
    place = _SPACE.match(text).end()  # type: ignore[union-attr]
    while place < len(text):
        found, place = decoder.raw_decode(text, place)
        yield from found if isinstance(found, list) else [found]
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]


def too_large(path: Path) -> str:
    """A sentence about the first number in a JSON file that is too large for the readers of `datasets`.

    Raises:
        ValueError: If there is none.
    """
    for number, row in enumerate(json_rows(path)):
        for column, value in _leaves(row, ""):
            whole = isinstance(value, int) and abs(value) >= 2**64
            if whole or (isinstance(value, Decimal) and abs(value) >= Decimal("1.8e308")):
                return f"row {number} (counted from 0) has a number in its field {column!r} that is too large to read"
    raise ValueError(f"{path} has no such number")


def value_at(values: Any, name: str) -> Any:
    """The value of a column in a row; a dot in its name leads into a nested one."""
    if not isinstance(values, Mapping):
        return None
    if name in values:
        return values[name]
    first, _, rest = name.partition(".")
    return value_at(values.get(first), rest) if rest else None


def _whole(text: str) -> int | Decimal:
    return int(text) if len(text) <= _LONGEST_INT else Decimal(text)


def _number(text: str) -> float | Decimal:
    exact, near = Decimal(text), float(text)
    return near if exact == Decimal(repr(near)) else exact


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value
