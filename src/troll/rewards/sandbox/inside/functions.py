"""Runs a program and serves operations on its names; the tests are elsewhere, and so is what they expect.

Started in a sandbox of its own with the channel to the judge as standard input. It may lie in every answer: nothing
that is decided here counts as more than an answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import confine
from peer import Peer

#: Not "__main__": the harnesses of the data sets load such programs, they do not run them.
MODULE = "solution"


class Server:
    """The program, and what may be asked of it.

    Args:
        channel: File descriptor of the channel to the judge.
    """

    def __init__(self, channel: int):
        self.peer = Peer(channel, self._serve)
        module = sys.modules[MODULE] = ModuleType(MODULE)
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


def _take_channel() -> int:
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    return channel


end = os._exit  # which the program may overwrite
confine.die_with_parent()
confine.confine(sys.argv[1])
confine.main_module()
Server(_take_channel()).peer.serve()
end(0)  # whatever threads the program left
