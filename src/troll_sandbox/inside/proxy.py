"""Stand-ins for objects of the other side of the channel: proxies, and twins of exception classes for `except`."""

from __future__ import annotations

from _collections import deque

from messages import exception_type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Characters of an exception's text or name that cross the channel.
_TEXT = 300


class Proxy:
    """Requests operations from the other side, through a `Peer`. Equality and hash are those of this object."""

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
        """Calls it with copies of the arguments, and applies changes of the copies to the arguments."""
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
    return proxy._proxy_peer.request(operation, proxy, *operands)


def merge(mine: Any, theirs: Any, changed: set[int] | None = None) -> Any:
    """Applies the changes of a copy to its original. Mutable containers are changed in place, at any depth.

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


def lineage(kind: type[BaseException]) -> object:
    """Returns the argument of `Peer.twin`: a builtin exception, or (name, class, lineages of its bases)."""
    if exception_type(kind.__name__) is kind:
        return kind
    bases = tuple(lineage(base) for base in kind.__bases__ if issubclass(base, BaseException))
    return kind.__name__[:_TEXT], kind, bases


def known_base(kind: type[BaseException]) -> type[BaseException]:
    """Returns the nearest builtin exception that a class is or inherits from."""
    return next(base for base in kind.__mro__ if exception_type(base.__name__) is base)


def describe(error: BaseException) -> tuple[object, str, tuple[object, ...], BaseException]:
    """Returns an exception's lineage, text and arguments, and the exception."""
    try:
        text = str(error)[:_TEXT]
    except Exception:
        text = ""
    error.__traceback__ = None  # it holds frames, and the other side may hold the exception for long
    return lineage(type(error)), text, tuple(error.args), error


def made(kind: type[BaseException], text: str, args: tuple[object, ...], original: object) -> BaseException:
    """Makes the exception that stands for `original`, an exception of the other side."""
    text = text[:_TEXT]
    error: BaseException
    try:
        error = kind.__new__(kind, *args) if isinstance(kind, Twin) else kind(*args)
    except Exception:  # some classes take other arguments than `args`
        error = RuntimeError(text)
    remote = f"{kind.__name__}: {text}" if text else kind.__name__
    vars(error).update(_text=text, _origin=original, remote=remote)
    return error


def original_of(value: Any) -> object:
    """Returns the other side's object if this is its twin (a class or an exception), otherwise the value itself."""
    if isinstance(value, type | BaseException):
        origin = vars(value).get("_origin")
        return origin if isinstance(origin, Proxy) else value
    return value


def _attribute_of(twin: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(vars(twin)["_origin"], name)


class Twin(type):
    """The metaclass of twins."""

    _origin: Any
    __getattr__ = _attribute_of

    @classmethod
    def of(cls, name: str, parents: tuple[type[BaseException], ...], origin: Proxy) -> Twin:
        """Makes the twin of `origin`; its parents are twins and builtin exceptions."""
        members = {"_origin": origin, "__str__": _text_of, "__getattr__": _attribute_of}
        try:
            return cls(name, parents, members)
        except TypeError:  # bases that do not go together
            return cls(name, parents[:1], members)

    def __call__(cls, /, *args: object, **kwargs: object) -> Any:
        """Makes an exception of the other side, and the one that stands for it here."""
        original = cls._origin(*args, **kwargs)
        return made(cls, str(original), args, original)  # type: ignore[arg-type]


def _text_of(error: BaseException) -> str:
    return str(vars(error).get("_text", ""))
