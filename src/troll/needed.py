"""Checks at import that a host library has the methods that an adapter needs, and reports what is missing.

Private methods change between versions. So an adapter does not check the version, but each method: its parameters, and
the names that its code uses.

The names are read from the compiled code, because a signature lacks the attributes and the keys of dictionaries in
which a host passes values on, and where one is renamed, a run would go on and train something else. The text of the
source need not be installed, and would also have the names in comments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Needed:
    """A function or method that we override, call or rely on.

    Attributes:
        owner: The class of the method, or the function itself.
        name: The method's name; None for a function.
        purpose: Our use of it.
        parameters: The names of the parameters that it must take.
        uses: Names, attributes and dictionary keys that must occur in its code.
    """

    owner: Any
    name: str | None
    purpose: str
    parameters: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Its qualified name and its purpose, for a message."""
        return f"{self.owner.__name__}{'' if self.name is None else '.' + self.name} ({self.purpose})"

    def missing(self) -> Iterator[str]:
        """Yields a clause for each missing method, parameter or name; nothing if all are there."""
        function: Callable[..., Any] | None = self.owner if self.name is None else getattr(self.owner, self.name, None)
        if function is None:
            yield f"{self.place} is missing"
            return
        function = inspect.unwrap(function)
        found = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values()):
            yield from (f"{self.place} has no parameter {name}" for name in self.parameters if name not in found)
        if self.uses:
            names = set(_names(function.__code__))
            yield from (f"{self.place} does not use {name}" for name in self.uses if name not in names)


def _names(code: CodeType) -> Iterator[str]:
    """Names, attributes and strings of a function, and of the functions inside it."""
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        for text in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(text, str):
                yield text
