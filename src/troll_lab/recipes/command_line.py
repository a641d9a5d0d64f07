"""The words that follow a recipe on the command line: `--field value`, `--field.name value`, `--plugins NAME NAME`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from troll.settings import did_you_mean
from troll_lab.recipes.fields import DICTIONARIES, FIELDS, PLUGINS, RecipeError, dictionary, field_of
from troll_lab.values import read_value


@dataclass(frozen=True)
class Overrides:
    """Settings of a command, over those of its recipe.

    Attributes:
        words: The words for TRL's parser.
        given: The value of each of their fields, None for a flag.
        inner: Settings inside dictionaries, by `field.name`.
        plugins: The plugins; None if the command names none.
    """

    words: list[str]
    given: dict[str, str | None]
    inner: dict[str, Any]
    plugins: list[str] | None

    @property
    def fields(self) -> set[str]:
        """All fields that the command sets, wholly or in part."""
        return {*self.given, *map(field_of, self.inner)}


def split(overrides: Sequence[str]) -> Overrides:
    """Takes the words of a command apart.

    Raises:
        RecipeError: If a value is missing or cannot be read, or a setting inside a dictionary is in no dictionary.
    """
    overrides, plugins = _without_plugins(overrides)
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
                rest.append(f"--{name}={json.dumps(dictionary(name, found))}")  # its classes read JSON only
                if not equals:
                    words.popleft()
            else:
                rest.append(word)
            # The parser also takes `--no_field`.
            given[name if name in FIELDS else name.removeprefix("no_")] = found
            continue
        if field_of(name) not in DICTIONARIES:
            raise RecipeError(f"unknown argument '--{name}'{did_you_mean(field_of(name), DICTIONARIES, prefix='--')}")
        if found is None:
            raise RecipeError(f"--{name} needs a value")
        if not equals:
            words.popleft()
        try:
            inner[name] = read_value(found)
        except ValueError as error:
            raise RecipeError(f"--{name}: {error}") from error
    if both := [name for name in inner if field_of(name) in given]:
        raise RecipeError(f"--{field_of(both[0])} and --{both[0]} set the same dictionary: give one of the two")
    return Overrides(rest, given, inner, plugins)


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
