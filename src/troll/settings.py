"""Help and suggestions for settings: what a command line or an error says about a field."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection
from dataclasses import fields
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


def described(config: type[T]) -> type[T]:
    """A decorator: the entries of a dataclass's docstring become the help of its fields on the command line."""
    entries = re.findall(r"^    (\w+): (.+(?:\n        .+)*)", inspect.cleandoc(config.__doc__ or ""), re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    for field in fields(config):  # type: ignore[arg-type]
        if field.name in texts:
            field.metadata = MappingProxyType({"help": texts[field.name], **field.metadata})
    return config


def did_you_mean(name: str, known: Collection[str], prefix: str = "") -> str:
    """The end of an error about an unknown name: a suggestion of the most similar known name, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{close[0]}?" if close else ""
