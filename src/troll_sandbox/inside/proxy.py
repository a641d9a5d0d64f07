"""Stands for an object of the other side of the channel."""

from __future__ import annotations

from _collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Proxy:
    """Asks the other side for operations, through a `Peer`. Equality and hash are those of this object."""

    __slots__ = ("_proxy_number", "_proxy_peer")  # unlike any attribute of the other side's object

    def __init__(self, peer: Any, number: int):
        object.__setattr__(self, "_proxy_peer", peer)
        object.__setattr__(self, "_proxy_number", number)

    def __getattr__(self, name: str) -> Any:
        # Copying, pickling and number classes of the standard library look for their special methods here.
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__dict__", "__annotations__"):
            raise AttributeError(name)
        return ask(self, "get", name)

    def __setattr__(self, name: str, value: object) -> None:
        ask(self, "set", name, value)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Calls it with copies of the arguments, and repeats changes of the copies in the arguments."""
        peer = self._proxy_peer
        result, changed = ask(self, "call", peer.pack((args, kwargs)))
        if changed is not None:
            merge((args, kwargs), peer.unpack(changed))
        return result

    def __iter__(self) -> Any:
        return ask(self, "iter")

    def __next__(self) -> Any:
        return ask(self, "next")

    def __bool__(self) -> Any:
        return ask(self, "bool")


def ask(proxy: Proxy, operation: str, *operands: object) -> Any:
    """Returns the result of an operation on the proxy's object."""
    peer = proxy._proxy_peer
    return peer.request(operation, proxy, *operands)


def merge(mine: Any, theirs: Any, changed: set[int] | None = None) -> Any:
    """Repeats in `mine` the changes of its copy. Mutable containers are changed in place, at any depth.

    Args:
        mine: The original of the copy.
        theirs: The copy after the call.
        changed: Ids of containers that have been changed. A container that occurs several times in `mine` has several
            copies. If only one of them was changed, the others must not undo that.

    Returns:
        `mine` if it could be changed to equal `theirs`, otherwise `theirs`.
    """
    changed = set() if changed is None else changed
    if type(mine) is not type(theirs):
        return theirs
    if isinstance(mine, tuple) and len(mine) == len(theirs):
        parts = tuple(merge(a, b, changed) for a, b in zip(mine, theirs, strict=True))
        return mine if all(a is b for a, b in zip(mine, parts, strict=True)) else parts
    if id(mine) in changed:
        return mine
    before = mine.copy() if isinstance(mine, list | deque | dict | set | bytearray) else None
    if isinstance(mine, list | deque):
        kept = [merge(a, b, changed) for a, b in zip(mine, theirs, strict=False)]
        rest = list(theirs)[len(kept) :]
        mine.clear()
        mine.extend(kept + rest)
    elif isinstance(mine, dict):
        items = {key: merge(mine[key], value, changed) if key in mine else value for key, value in theirs.items()}
        mine.clear()
        mine.update(items)
    elif isinstance(mine, set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, bytearray):
        mine[:] = theirs
    else:
        return theirs
    if mine != before:
        changed.add(id(mine))
    return mine
