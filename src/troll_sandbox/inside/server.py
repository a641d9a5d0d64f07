"""The program's end of the channel: runs the program and serves operations on its names.

It may lie in every answer: nothing that is decided here counts as more than an answer.
"""

from __future__ import annotations

import _operator as operator  # what the other one is made of, which takes longer to import
import sys

from peer import Peer
from prelude import execute
from twins import lineage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Not "__main__": the harnesses of the data sets load such programs, they do not run them.
MODULE = "solution"

#: What is asked for by its own name.
_FUNCTIONS: tuple[Callable[..., object], ...] = (
    abs, bool, complex, float, format, hash, int, iter, len, next, repr, reversed, round, str, type,
    operator.delitem, operator.getitem, operator.index, operator.invert, operator.neg, operator.pos, operator.setitem,
)  # fmt: skip


class Server:
    """The program, and what may be asked of it.

    Args:
        channel: File descriptor of the channel to the judge.
    """

    def __init__(self, channel: int):
        self.peer = Peer(channel, self._serve)
        module = sys.modules[MODULE] = type(sys)(MODULE)
        self._names = vars(module)
        self._operations: dict[str, Callable[..., object]] = {
            "run": self._run,
            "has": lambda name: name in self._names,
            "name": self._name,
            "call": self._call,
            "get": getattr,
            "set": setattr,
            "del": delattr,
            "operate": _operate,
            "equal": lambda one, other: (one == other, _fields(one), _fields(other)),
            "has_instance": lambda kind, instance: isinstance(instance, kind),
            "has_subclass": lambda kind, other: issubclass(other, kind),
            "enter": lambda context: type(context).__enter__(context),
            "exit": _exit,
            "await": _await,
            **{function.__name__: function for function in _FUNCTIONS},
        }

    def _serve(self, operation: str, *operands: object) -> object:
        return self._operations[operation](*operands)

    def _run(self, source: str, provided: bool) -> None:
        execute(source, f"{MODULE}.py", self._names, provided)

    def _name(self, name: str) -> tuple[object, object]:
        """What the name is of, and its lineage where that is a class of exceptions."""
        thing = self._names[name]
        return thing, lineage(thing) if isinstance(thing, type) and issubclass(thing, BaseException) else None

    def _call(self, function: Callable[..., object], packed: bytes) -> tuple[object, bytes | None]:
        args, kwargs = self.peer.unpack(packed)
        result = function(*args, **kwargs)
        after = self.peer.pack((args, kwargs))
        return result, after if after != packed else None


def _operate(one: Any, name: str, other: Any) -> object:
    operation: Callable[[Any, Any], object] = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    return operation(one, other)


def _fields(thing: object) -> dict[str, object]:
    """What an object holds, as far as a data class compares it."""
    kind = type(thing)
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    fields = {name: getattr(thing, name) for name in names if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    declared = getattr(kind, "__dataclass_fields__", {})
    return {name: value for name, value in fields.items() if name not in declared or declared[name].compare}


def _exit(context: Any, error: BaseException | type[BaseException] | None) -> None:
    if isinstance(error, type):  # raised by the tests; of it there is only the class
        try:
            error = error()
        except TypeError:
            error = Exception()
    type(context).__exit__(context, None if error is None else type(error), error, None)


def _await(thing: Any) -> object:
    import asyncio

    async def wait() -> object:
        return await thing

    return asyncio.run(wait())
