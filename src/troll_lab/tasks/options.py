"""Reads the options of a task one by one; options that are left over are errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from troll_lab.tasks.registry import TaskConfig, TaskError
from troll_lab.tasks.rows import Column


class Options:
    """Reads `task_options`; call `finish` after the last one.

    Args:
        config: The task's configuration, with its `task_options`.

    Raises:
        TaskError: In every method, if an option has the wrong type or value.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._task = config.task
        self._given = config.options
        self._known: list[str] = []

    def text(self, name: str) -> str | None:
        """Takes a text, None by default."""
        value = self._take(name, None)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Takes one of `choices`, the first by default."""
        value = self._take(name, choices[0])
        if value not in choices:
            raise self._wrong(name, f"one of {', '.join(choices)}", value)
        return str(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Takes true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(self, name: str) -> float | None:
        """Takes a number above 0, None by default."""
        value = self._take(name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise self._wrong(name, "a number above 0", value)
        return value

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """Takes a whole number of at least `least`."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, f"a whole number of at least {least}", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Takes a list of texts, empty by default."""
        value = self._take(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts", value)
        return tuple(value)

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """Takes a list of pairs of texts, empty by default."""
        value = self._take(name, [])
        if not isinstance(value, list) or not all(map(_is_pair, value)):
            raise self._wrong(name, 'a list of pairs of texts, such as [["3 + 4 =", "7"]]', value)
        return tuple((first, second) for first, second in value)

    def numbers(self, name: str, fields: Sequence[str]) -> dict[str, float] | None:
        """Takes a mapping with exactly these fields, each a number above 0; None by default."""
        value = self._take(name, None)
        if value is None:
            return None
        if not isinstance(value, dict) or sorted(value) != sorted(fields):
            raise self._wrong(name, f"a mapping with {' and '.join(fields)}", value)
        for field in fields:
            if isinstance(value[field], bool) or not isinstance(value[field], int | float) or not value[field] > 0:
                raise self._wrong(f"{name}.{field}", "a number above 0", value[field])
        return value

    def columns(self, defaults: Mapping[str, Column]) -> dict[str, Column]:
        """Takes `columns`, the names of the data's columns for the task's fields."""
        given = self._take("columns", {})
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given.values()):
            raise self._wrong("columns", "a mapping of names, such as {prompt: question, answer: solution}", given)
        for field in given:
            if field not in defaults:
                raise TaskError(f"task {self._task!r} reads no column {field!r}; it reads {', '.join(defaults)}")
        return {field: Column((given[field],)) if field in given else defaults[field] for field in defaults}

    def finish(self) -> None:
        """Refuses options that were not taken."""
        for name in self._given:
            known = f"it has {', '.join(self._known)}" if self._known else "it takes none"
            raise TaskError(f"task {self._task!r} has no option {name!r}; {known}")

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        return self._given.pop(name, default)

    def _wrong(self, name: str, must_be: str, value: Any) -> TaskError:
        return TaskError(f"task option {name} must be {must_be}, got {value!r}")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
