"""Everything undocumented in verl, and in its use of Megatron and vLLM, that we build on: its purpose and its shape.

verl changes every few weeks. What counts is not its version but the parts that we build on, so at import `training` and
`rollout` check that every class, method and parameter is there, and say what is missing. Nothing else in `troll.verl`
imports from verl. A process imports only the module that it needs: a server does not load the training engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Versions that the tests ran with.
VERIFIED = ("0.9.0", "0.9.1")

try:
    _found = version("verl")
except PackageNotFoundError:
    raise ImportError("troll.verl needs verl: pip install 'troll-rl[verl]'") from None

from verl.utils import tensordict_utils as tu  # noqa: E402

__all__ = ["Needed", "check", "lacking", "tu"]


def lacking(what: object) -> ImportError:
    """The error to raise for something that the installed verl lacks."""
    return ImportError(
        f"troll.verl builds on what verl {_found} does not have: {what}. It is verified with verl "
        f"{' and '.join(VERIFIED)}"
    )


@dataclass(frozen=True)
class Needed:
    """A function or method of verl's that we override or call.

    Attributes:
        owner: The class of the method, or the function itself.
        name: The method's name; None for a function.
        purpose: What we need it for.
        parameters: The names of the parameters that it must take.
    """

    owner: Any
    name: str | None
    purpose: str
    parameters: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What it lacks, in words; None if nothing."""
        function: Callable[..., Any] | None = self.owner if self.name is None else getattr(self.owner, self.name, None)
        name = f"{self.owner.__name__}{'' if self.name is None else '.' + self.name}"
        if function is None:
            return f"{name} ({self.purpose})"
        found = inspect.signature(function).parameters
        if any(x.kind is x.VAR_KEYWORD for x in found.values()):
            return None
        lacking = [parameter for parameter in self.parameters if parameter not in found]
        return f"{', '.join(lacking)} of {name} ({self.purpose})" if lacking else None


def check(needed: Iterable[Needed]) -> None:
    """Raises ImportError unless everything is there."""
    missing = [found for found in (each.missing() for each in needed) if found is not None]
    if missing:
        raise lacking("; ".join(missing))
