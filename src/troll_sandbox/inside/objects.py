"""The judge's stand-ins for objects of the program.

The expected values are plain data of the tests. These rules prevent an object from falsely passing as an expected
value:

- An object never equals plain data, and is never greater or less than it.
- The program compares two of its objects. It could return plain data to the same effect, except for an object that
  equals everything. So what two equal objects hold has to agree.
- An object can be turned into plain data: the program could have returned that.
- An operator between an object and plain data shows the program that data, so it could answer "no difference" to any
  expected value. Therefore the tests must have made the object by calling a name that is written like a class, and the
  result is *mixed*: it has attributes and equality, but is not a number, text or container.
- A method may always return True: the tests chose to trust it. But the method has to exist under its name. The result
  of a function has no methods if it has an attribute of any name, as with `__getattr__`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from random import SystemRandom
from typing import Any

from proxy import Proxy, Twin, ask, known_base

#: How names of classes are written, unlike those of most functions.
CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")

_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip

_ORDERS = ("lt", "gt", "le", "ge")

#: Operations that make plain data of an object.
_CONVERSIONS = (
    "neg", "pos", "invert", "abs", "round", "int", "float", "complex", "index", "bool", "hash",
    "len", "iter", "next", "reversed", "getitem", "str", "repr", "format", "enter",
)  # fmt: skip

#: Attributes of numbers and containers; mixed objects refuse them.
_PLAIN = (int, float, complex, str, bytes, list, tuple, set, dict, Counter, Decimal, Fraction, datetime, timedelta)
_PLAIN_NAMES = {name for kind in _PLAIN for name in dir(kind)}
_PLAIN_NAMES |= {"all", "any", "item", "max", "mean", "min", "norm", "sum", "tolist"}  # of an array

#: Methods of texts, sets, tables and arrays that compare with an expected value and return a bool.
_QUESTIONS = {name for name in _PLAIN_NAMES if name.startswith("is")} | {"startswith", "endswith"}
_QUESTIONS |= {"allclose", "equal", "equals", "identical", "isclose"}

_NOTHING, _CLASS, _INSTANCE, _MIXED = range(4)

_chance = SystemRandom()  # cannot be seeded by tests, and differs among the children of a judge


class ProgramObject(Proxy):
    """An object of the program."""

    __slots__ = ("_proxy_probed", "_proxy_role")

    def __init__(self, peer: Any, number: int):
        super().__init__(peer, number)
        object.__setattr__(self, "_proxy_probed", False)
        _mark(self, _NOTHING)

    __doc__ = property(lambda self: ask(self, "get", "__doc__"))

    def __getattr__(self, name: str) -> Any:
        if name in _PLAIN_NAMES:
            _refuse_mixed(self)
        if name in _QUESTIONS and self._proxy_role == _NOTHING:
            raise TypeError(f"{name} is a question about data, and the program returned an object of its own")
        value = super().__getattr__(name)
        if is_object(value) and self._proxy_role == _NOTHING:
            _refuse_any_name(self)
        return value

    def __delattr__(self, name: str) -> None:
        ask(self, "del", name)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Calls it, as `Proxy` does; the result of a class is an instance."""
        _refuse_mixed(self)
        result = super().__call__(*args, **kwargs)
        if self._proxy_role == _CLASS and is_object(result):
            _mark(result, _INSTANCE)
        return result

    def __eq__(self, other: object) -> bool:
        return _same(self, other) if is_object(other) else NotImplemented

    def __setitem__(self, key: object, value: object) -> None:
        ask(self, "setitem", key, value)

    def __delitem__(self, key: object) -> None:
        ask(self, "delitem", key)

    def __instancecheck__(self, instance: object) -> Any:
        return ask(self, "has_instance", instance)

    def __subclasscheck__(self, kind: object) -> Any:
        return ask(self, "has_subclass", kind)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Its answer is ignored, so no exception is swallowed: the program could hide that an assertion failed.
        ask(self, "exit", error if error is None or isinstance(kind, Twin) else known_base(type(error)))

    def __await__(self) -> Generator[Any, None, Any]:
        return _plain(self, "await")
        yield  # makes this a generator, as `await` requires


def is_object(value: object) -> bool:
    """Whether it is an object of the program, without asking the program."""
    return type(value) is ProgramObject


def mark_class(value: object) -> None:
    """Marks an object of the program that the tests call by a name written like a class's."""
    if is_object(value):
        _mark(value, _CLASS)


class _Types(type):
    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        if cls is not Type:
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs or not is_object(args[0]):
            return type(*args, **kwargs)
        found = ask(args[0], "type")
        return found if is_object(found) else ProgramObject  # its type is not builtin, even if it claims to be

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, type)


class Type(type, metaclass=_Types):
    """Stands for `type` in tests: `type(x)` of an object of the program is the program's class."""


def _refuse_any_name(thing: ProgramObject) -> None:
    """Asks an object once for an attribute with a random name, which looks like a word; raises if there is one."""
    if thing._proxy_probed:
        return
    name = "".join(_chance.choice(letters) for letters in ("bdfgklmnprstv", "aeiou") * 4)
    try:
        ask(thing, "get", name)
    except Exception:
        object.__setattr__(thing, "_proxy_probed", True)
    else:
        raise TypeError("an object that the program returned has an attribute of any name")


def _same(left: Any, right: Any) -> bool:
    """Whether two objects are equal by the program's comparison and by their attributes.

    The second condition refuses an object that equals everything.

    Raises:
        TypeError: The program calls them equal, but they have no common attributes, or different ones.
    """
    if left is right:
        return True
    peer = left._proxy_peer
    pair = (left._proxy_number, right._proxy_number)
    if pair in peer.comparing:  # objects that hold each other
        return True
    answer = peer.request("equal", left, right)
    if type(answer) is not tuple or len(answer) != 3 or answer[0] is not True:
        return False
    ours, theirs = answer[1:]
    shared = ours.keys() & theirs.keys() if type(ours) is type(theirs) is dict else set()
    peer.comparing.add(pair)
    try:
        if shared and all(ours[name] == theirs[name] for name in shared):
            return True
    finally:
        peer.comparing.discard(pair)
    raise TypeError("the program calls two of its objects equal, but they hold different data")


def _ordered(name: str, left: Any, right: Any) -> bool:
    if not (is_object(left) and is_object(right)):
        return NotImplemented
    _refuse_mixed(left, right)
    answer = ask(left, "operate", name, right)
    if type(answer) is not bool:
        raise TypeError("the program compared two of its objects, but the answer is not a bool")
    if answer and name in ("lt", "gt") and ask(right, "operate", name, left) is True:
        raise TypeError("the program orders each of two of its objects before the other")
    return answer


def _operated(name: str, left: Any, right: Any) -> Any:
    objects = [value for value in (left, right) if is_object(value)]
    mixed = len(objects) == 1 or any(value._proxy_role == _MIXED for value in objects)
    if len(objects) == 1 and objects[0]._proxy_role < _INSTANCE:
        return NotImplemented
    peer = objects[0]._proxy_peer
    result = peer.request("operate", left, name, right)
    if mixed and not is_object(result):
        raise TypeError(f"the program's {name} with a value of the tests has to return an object of its own")
    if is_object(result) and any(value._proxy_role for value in objects):
        _mark(result, _MIXED if mixed else max(_INSTANCE, result._proxy_role))
    return result


def _plain(self: ProgramObject, operation: str, *operands: object) -> Any:
    _refuse_mixed(self)
    return ask(self, operation, *operands)


def _refuse_mixed(*values: Any) -> None:
    if any(value._proxy_role == _MIXED for value in values):
        raise TypeError("an object that the program made from a value of the tests has only attributes and equality")


def _mark(value: Any, role: int) -> None:
    object.__setattr__(value, "_proxy_role", role)


def _define(name: str, method: Callable[..., Any]) -> None:
    setattr(ProgramObject, f"__{name}__", lambda self, *operands: method(name, self, *operands))


for _name in _CONVERSIONS:
    _define(_name, lambda name, self, *operands: _plain(self, name, *operands))
for _name in _ORDERS:
    _define(_name, _ordered)
for _name in _OPERATORS:
    _define(_name, _operated)
    _define(f"r{_name}", lambda name, self, other: _operated(name[1:], other, self))
