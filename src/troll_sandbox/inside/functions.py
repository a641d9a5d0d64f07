"""Runs inside the sandbox: a program whose functions are called. Its tests and expected values are elsewhere.

Standard input is the channel to the judge; standard output reports that the sandbox has started. The program shares
this process and can fake every answer, so the judge trusts none.
"""

from __future__ import annotations

import _operator as operator  # `operator` itself takes longer to import
import os
import sys

import confine
from peer import Peer
from prelude import execute
from proxy import lineage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Not "__main__": the harnesses of the data sets import such programs.
MODULE = "solution"

#: Operations with the name of a function.
_FUNCTIONS: tuple[Callable[..., object], ...] = (
    abs, bool, complex, float, format, hash, int, iter, len, next, repr, reversed, round, str, type,
    operator.delitem, operator.getitem, operator.index, operator.invert, operator.neg, operator.pos, operator.setitem,
)  # fmt: skip


class Server:
    """Runs the program and serves operations on its names.

    Args:
        channel: File descriptor of the channel to the judge.
    """

    def __init__(self, channel: int):
        self.peer = Peer(channel, lambda operation, *operands: self._operations[operation](*operands))
        module = sys.modules[MODULE] = type(sys)(MODULE)
        self._names = vars(module)
        self._operations: dict[str, Callable[..., object]] = {
            "run": lambda source, provided: execute(source, f"{MODULE}.py", self._names, provided),
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

    def _name(self, name: str) -> tuple[object, object]:
        """The value of a name, and its lineage if it is an exception class."""
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
    """The attributes that a data class of these would compare."""
    kind = type(thing)
    slots = [getattr(base, "__slots__", ()) for base in kind.__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    fields = {name: getattr(thing, name) for name in names if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    declared = getattr(kind, "__dataclass_fields__", {})
    return {name: value for name, value in fields.items() if name not in declared or declared[name].compare}


def _exit(context: Any, error: BaseException | type[BaseException] | None) -> None:
    if isinstance(error, type):  # an exception that the tests raised arrives as its class
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


def main() -> None:
    """Serves the judge until the channel is closed."""
    end = os._exit  # the program may overwrite it
    confine.die_with_parent()
    confine.confine(sys.argv[1])
    confine.main_module()
    channel = os.dup(0)
    os.write(1, b"+")  # the sandbox has started
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    Server(channel).peer.serve()
    end(0)  # although threads of the program may still run


main()
