"""Exceptions that cross the channel. An exception class of the other side has a twin here, for use in `except`."""

from __future__ import annotations

from messages import exception_type
from proxy import Proxy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TEXT = 300


def lineage(kind: type[BaseException]) -> object:
    """Returns what `Peer.twin` makes a twin from: a builtin exception, or (name, class, lineages of its bases)."""
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
