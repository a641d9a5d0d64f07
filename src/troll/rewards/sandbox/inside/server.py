"""The program's end of the channel: runs the program and serves operations on its names.

It may lie in every answer: nothing that is decided here counts as more than an answer.
"""

from __future__ import annotations

import sys

from peer import Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Not "__main__": the harnesses of the data sets load such programs, they do not run them.
MODULE = "solution"


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
            "name": lambda name: self._names[name],
            "call": self._call,
            "get": getattr,
            "set": setattr,
            "iter": iter,
            "next": next,
            "len": len,
            "bool": bool,
            "item": lambda container, key: container[key],
            "set_item": _set_item,
            "str": str,
            "repr": repr,
            "has_instance": lambda kind, instance: isinstance(instance, kind),
        }

    def _serve(self, operation: str, *operands: object) -> object:
        return self._operations[operation](*operands)

    def _run(self, source: str) -> None:
        exec(compile(source, f"{MODULE}.py", "exec", dont_inherit=True), self._names)

    def _call(self, function: Callable[..., object], packed: bytes) -> tuple[object, bytes | None]:
        args, kwargs = self.peer.unpack(packed)
        result = function(*args, **kwargs)
        after = self.peer.pack((args, kwargs))
        return result, after if after != packed else None


def _set_item(container: Any, key: object, value: object) -> None:
    container[key] = value
