"""Calls of a program into the judge: functions that the tests pass to it.

The judge is trusted and has the expected values. So a program may call only the tests' own functions, and functions of
Python that return plain results for plain arguments: with `type`, `setattr` or a mock it could build an object in the
judge that equals everything.
"""

from __future__ import annotations

import functools
import math
import operator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType

from objects import ProgramObject, Type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PLAIN = (
    bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict,
    enumerate, filter, map, range, reversed, zip,
    abs, all, any, bin, chr, divmod, hex, len, max, min, oct, ord, pow, print, repr, round, sorted, sum,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.neg, operator.pos, operator.abs, operator.invert, operator.not_, operator.truth,
    operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.concat, operator.contains, operator.getitem,
    *(thing for thing in vars(math).values() if isinstance(thing, BuiltinFunctionType)),
)  # fmt: skip
_PLAIN_IDS = set(map(id, _PLAIN))  # not everything that tests pass has a hash

#: Such as `str.lower` and `seen.append`. Not `str.format`: "{0.__globals__}" would show the globals of the tests.
_METHODS: dict[type, set[str]] = {
    str: {"capitalize", "endswith", "isalpha", "isdigit", "islower", "isspace", "isupper", "join", "lower", "split",
          "startswith", "strip", "swapcase", "title", "upper"},
    list: {"append", "count", "extend", "index", "pop", "__getitem__"},
    set: {"add", "discard", "__contains__"},
    dict: {"get", "__contains__", "__getitem__"},
}  # fmt: skip


def call(function: Any, args: object, kwargs: object, namespace: dict[str, Any]) -> Any:
    """Calls a function of the tests for the program.

    Args:
        function: Any object that the tests passed to the program.
        args: Positional arguments, as the program sent them.
        kwargs: Keyword arguments, as the program sent them.
        namespace: Globals of the tests.

    Raises:
        TypeError: A program may not call it, or not with these arguments.
    """
    if type(args) is not tuple or type(kwargs) is not dict:  # a proxy could change after the checks
        raise TypeError("arguments have to be a tuple and a dictionary")
    asks_type = (function is type or function is Type) and len(args) == 1 and not kwargs
    if not (_is_own(function, namespace) or asks_type):
        # Otherwise a function that calls its arguments could call any of these.
        for thing in (function, *args, *kwargs.values()):
            if callable(thing) and not _is_allowed(thing, namespace):
                raise TypeError("a program can call functions that the tests define, and a few of Python's")
        if any(_calls_elements(thing) for thing in args):
            raise TypeError("a program cannot pass map or filter to a function of Python")
    return function(*args, **kwargs)


def _is_own(function: Any, namespace: dict[str, Any]) -> bool:
    if type(function) is MethodType:
        function = function.__func__
    return type(function) is FunctionType and function.__globals__ is namespace


def _calls_elements(thing: object) -> bool:
    """Whether it is map or filter, which would call functions in lists, where nothing checks them."""
    while type(thing) is functools.partial:
        thing = thing.func
    return thing is map or thing is filter


def _is_allowed(function: Any, namespace: dict[str, Any]) -> bool:
    kind = type(function)
    if kind is functools.partial:
        parts = (function.func, *function.args, *function.keywords.values())
        allowed = all(_is_allowed(part, namespace) for part in parts if callable(part))
        return allowed or _is_own(function.func, namespace)
    if kind is BuiltinFunctionType and type(function.__self__) in _METHODS:
        return function.__name__ in _METHODS[type(function.__self__)]
    if kind is MethodDescriptorType:
        return function.__name__ in _METHODS.get(function.__objclass__, ())
    known = kind in (ProgramObject, operator.itemgetter) or id(function) in _PLAIN_IDS
    return known or _is_own(function, namespace)
