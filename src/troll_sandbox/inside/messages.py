"""Plain data between two processes, one of which is not trusted: a strict format, and references to other objects.

Values are copied: the receiver makes objects of builtin types, without methods or code of the sender. Objects that
cannot be copied (instances of the sender's classes, functions, generators) are sent as a number.
"""

from __future__ import annotations

import builtins
import struct
import sys
from _collections import OrderedDict, defaultdict, deque

TYPE_CHECKING = False  # importing it from typing takes longer than all imports here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    #: From an object that cannot be copied to (whether it is the receiver's own, its number).
    Refer = Callable[[object], tuple[bool, int]]
    #: The reverse, on the receiver's side.
    Resolve = Callable[[bool, int], object]

MAX_BYTES = 32 * 2**20
MAX_DEPTH = 10_000


class MessageError(Exception):
    """A value to send is too large or too deep, or the bytes that arrived are not a value."""


# These types are sent by name. They only build data: with `exec` or `type`, one side could make the other run its code.
_SHARED_TYPES = {
    kind.__name__: kind
    for kind in (
        object, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, type(None),
    )
}  # fmt: skip
_BUILTINS = dict(vars(builtins))  # a copy: programs write to the module
#: Factories of `defaultdict`, sent as their index here; any other is sent as None.
_FACTORIES: tuple[Any, ...] = (None, list, dict, set, int, float, str, tuple, bool)


def exception_type(name: object) -> type[BaseException] | None:
    """Returns the builtin exception with a name, None if there is none."""
    kind = _BUILTINS.get(name) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _shared_type(name: str) -> type | None:
    return _SHARED_TYPES.get(name) or exception_type(name)


def encode(value: object, refer: Refer) -> bytes:
    """Returns the bytes of a value.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, named tuple, set, frozenset, dict,
            deque, Counter, OrderedDict, defaultdict, Decimal, Fraction, range, slice, date, naive datetime and time,
            timedelta or a NumPy scalar. An instance of a subclass is sent as its base, a builtin type or exception by
            name, and everything else as a reference.
        refer: Gives the number of a reference.

    Raises:
        MessageError: The bytes exceed `MAX_BYTES`, or containers are nested deeper than `MAX_DEPTH`.
    """
    encoder = _Encoder(refer)
    encoder.put(value, 0)
    return b"".join(encoder.parts)


def decode(data: bytes, resolve: Resolve) -> Any:
    """Returns the value of bytes from `encode`; raises `MessageError` if they are not exactly one value."""
    try:
        decoder = _Decoder(data, resolve)
        value = decoder.take(0)
        if decoder.at != len(data):
            raise MessageError("bytes after the value")
    except MessageError:
        raise
    except Exception as error:  # only wrong bytes can fail
        raise MessageError(f"no value: {type(error).__name__}") from error
    return value


class _Encoder:
    def __init__(self, refer: Refer):
        self.parts: list[bytes] = []
        self._refer = refer
        self._room = MAX_BYTES

    def put(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise MessageError(f"a value is nested deeper than {MAX_DEPTH} levels")
        writer = _WRITERS.get(type(value))
        if writer is None:
            writer = next((write for kind, write in _WRITERS.items() if isinstance(value, kind)), _put_rare)
        writer(self, value, depth)

    def add(self, part: bytes) -> None:
        self._room -= len(part)
        if self._room < 0:
            raise MessageError(f"a value takes more than {MAX_BYTES} bytes")
        self.parts.append(part)

    def block(self, tag: bytes, payload: bytes) -> None:
        self.add(tag + len(payload).to_bytes(4, "big") + payload)

    def items(self, tag: bytes, items: Any, count: int, depth: int) -> None:
        self.add(tag + count.to_bytes(4, "big"))
        for item in items:
            self.put(item, depth + 1)

    def mapping(self, tag: bytes, value: dict[Any, Any], depth: int) -> None:
        self.add(tag + len(value).to_bytes(4, "big"))
        for key, item in dict.items(value):
            self.put(key, depth + 1)
            self.put(item, depth + 1)

    def reference(self, value: object) -> None:
        yours, number = self._refer(value)
        self.add((b"O" if yours else b"R") + number.to_bytes(8, "big"))


def _put_int(encoder: _Encoder, value: int, depth: int) -> None:
    value = int(value)
    encoder.block(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _put_list(encoder: _Encoder, value: list[Any], depth: int) -> None:
    # Long lists usually hold numbers of one type.
    kinds = set(map(type, value)) if type(value) is list else set()
    for kind, tag, code in ((int, b"I", "q"), (float, b"J", "d")):
        if kinds == {kind}:
            try:
                numbers = struct.pack(f">{len(value)}{code}", *value)
            except struct.error:  # integers of more than 64 bits
                break
            return encoder.block(tag, numbers)
    encoder.items(b"l", list.__iter__(value), list.__len__(value), depth)


def _put_tuple(encoder: _Encoder, value: tuple[Any, ...], depth: int) -> None:
    kind, items = type(value), list(tuple.__iter__(value))
    names = None if kind is tuple else getattr(kind, "_fields", None)
    if type(names) is not tuple or len(names) != len(items) or not all(map(_is_field, names)):
        return encoder.items(b"t", items, len(items), depth)
    encoder.items(b"n", (kind, kind.__name__, names, *items), len(items) + 3, depth)


def _is_field(name: object) -> bool:
    return type(name) is str and name.isidentifier() and not name.startswith("_")


def _put_defaultdict(encoder: _Encoder, value: Any, depth: int) -> None:
    index = next((index for index, factory in enumerate(_FACTORIES) if value.default_factory is factory), 0)
    encoder.mapping(b"D" + bytes([index]), value, depth)


def _put_dict(encoder: _Encoder, value: dict[Any, Any], depth: int) -> None:
    # Counter exists only if `collections` is imported, and importing it for every program would take too long.
    counter = getattr(sys.modules.get("collections"), "Counter", None)
    encoder.mapping(b"C" if counter and isinstance(value, counter) else b"d", value, depth)


def _put_type(encoder: _Encoder, value: type, depth: int) -> None:
    if _shared_type(value.__name__) is value:
        encoder.block(b"T", value.__name__.encode())
    else:
        encoder.reference(value)


# The order counts: an instance of two of them is sent as the first.
_WRITERS: dict[type, Callable[[_Encoder, Any, int], None]] = {
    type(None): lambda encoder, value, depth: encoder.add(b"N"),
    bool: lambda encoder, value, depth: encoder.add(b"1" if value else b"0"),
    int: _put_int,
    str: lambda encoder, value, depth: encoder.block(b"s", str.encode(value, "utf-8", "surrogatepass")),
    float: lambda encoder, value, depth: encoder.add(b"f" + struct.pack(">d", value)),
    list: _put_list,
    tuple: _put_tuple,
    defaultdict: _put_defaultdict,
    OrderedDict: lambda encoder, value, depth: encoder.mapping(b"o", value, depth),
    dict: _put_dict,
    set: lambda encoder, value, depth: encoder.items(b"S", value, len(value), depth),
    frozenset: lambda encoder, value, depth: encoder.items(b"F", value, len(value), depth),
    bytes: lambda encoder, value, depth: encoder.block(b"b", bytes(value)),
    bytearray: lambda encoder, value, depth: encoder.block(b"B", bytes(value)),
    complex: lambda encoder, value, depth: encoder.add(b"c" + struct.pack(">dd", value.real, value.imag)),
    range: lambda encoder, value, depth: encoder.items(b"r", (value.start, value.stop, value.step), 3, depth),
    slice: lambda encoder, value, depth: encoder.items(b"e", (value.start, value.stop, value.step), 3, depth),
    deque: lambda encoder, value, depth: encoder.items(b"q", (value.maxlen, *value), len(value) + 1, depth),
    type: _put_type,
}


def _put_rare(encoder: _Encoder, value: Any, depth: int) -> None:
    def is_a(module: str, name: str) -> bool:
        kind = getattr(sys.modules.get(module), name, None)
        return isinstance(kind, type) and isinstance(value, kind)

    if is_a("decimal", "Decimal"):
        encoder.block(b"m", str(value).encode())
    elif is_a("fractions", "Fraction"):
        encoder.items(b"x", (value.numerator, value.denominator), 2, depth)
    elif is_a("datetime", "timedelta"):
        encoder.items(b"y", (value.days, value.seconds, value.microseconds), 3, depth)
    elif is_a("datetime", "datetime") and value.tzinfo is None:
        encoder.block(b"z", value.isoformat().encode())
    elif is_a("datetime", "date") and not is_a("datetime", "datetime"):
        encoder.block(b"a", value.isoformat().encode())
    elif is_a("datetime", "time") and value.tzinfo is None:
        encoder.block(b"w", value.isoformat().encode())
    elif is_a("numpy", "generic"):
        encoder.put(value.item(), depth + 1)
    else:
        encoder.reference(value)


class _Decoder:
    def __init__(self, data: bytes, resolve: Resolve):
        self.at = 0
        self._data = data
        self._resolve = resolve

    def take(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MessageError("nested too deeply")
        return _READERS[self.raw(1)](self, depth + 1)

    def raw(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise MessageError("a value ends early")
        return self._data[start : self.at]

    def count(self) -> int:
        return int.from_bytes(self.raw(4), "big")

    def block(self) -> bytes:
        return self.raw(self.count())

    def text(self) -> str:
        return self.block().decode("ascii")

    def items(self, depth: int) -> list[Any]:
        return [self.take(depth) for _ in range(self.count())]

    def numbers(self, code: str) -> list[Any]:
        data = self.block()
        return list(struct.unpack(f">{len(data) // 8}{code}", data))

    def integers(self, depth: int) -> list[int]:
        items = self.items(depth)
        if any(type(item) is not int for item in items):
            raise MessageError("integers expected")
        return items

    def mapping(self, depth: int) -> dict[Any, Any]:
        return {self.take(depth): self.take(depth) for _ in range(self.count())}

    def reference(self, yours: bool) -> object:
        return self._resolve(yours, int.from_bytes(self.raw(8), "big"))


# Classes that stand for named tuples of the other side, by (id of the reference to the class, names of the fields).
_records: dict[tuple[int, tuple[str, ...]], type[tuple[Any, ...]]] = {}


def _take_record(decoder: _Decoder, depth: int) -> Any:
    origin, name, names, *items = decoder.items(depth)
    if isinstance(origin, type):  # a class of this side comes back
        if not issubclass(origin, tuple) or getattr(origin, "_fields", None) != names or len(items) != len(names):
            raise MessageError("no named tuple")
        return tuple.__new__(origin, items)
    kind = _records.get((id(origin), names))
    if kind is None:
        from collections import namedtuple

        kind = _records[id(origin), names] = namedtuple(name, names)  # this checks the names
        kind._origin = origin  # type: ignore[attr-defined]
    return kind._make(items)  # type: ignore[attr-defined]


def _take_slice(decoder: _Decoder, depth: int) -> slice:
    start, stop, step = decoder.items(depth)
    return slice(start, stop, step)


def _take_deque(decoder: _Decoder, depth: int) -> Any:
    maxlen, *items = decoder.items(depth)
    return deque(items, maxlen)


def _take_counter(decoder: _Decoder, depth: int) -> Any:
    from collections import Counter

    counter: Counter[Any] = Counter()
    dict.update(counter, decoder.mapping(depth))
    return counter


def _take_type(decoder: _Decoder, depth: int) -> type:
    kind = _shared_type(decoder.text())
    if kind is None:
        raise MessageError("no such type")
    return kind


_READERS: dict[bytes, Callable[[_Decoder, int], Any]] = {
    b"N": lambda decoder, depth: None,
    b"0": lambda decoder, depth: False,
    b"1": lambda decoder, depth: True,
    b"i": lambda decoder, depth: int.from_bytes(decoder.block(), "big", signed=True),
    b"s": lambda decoder, depth: decoder.block().decode("utf-8", "surrogatepass"),
    b"f": lambda decoder, depth: struct.unpack(">d", decoder.raw(8))[0],
    b"l": _Decoder.items,
    b"I": lambda decoder, depth: decoder.numbers("q"),
    b"J": lambda decoder, depth: decoder.numbers("d"),
    b"t": lambda decoder, depth: tuple(decoder.items(depth)),
    b"d": _Decoder.mapping,
    b"D": lambda decoder, depth: defaultdict(_FACTORIES[decoder.raw(1)[0]], decoder.mapping(depth)),
    b"o": lambda decoder, depth: OrderedDict(decoder.mapping(depth)),
    b"C": _take_counter,
    b"S": lambda decoder, depth: set(decoder.items(depth)),
    b"F": lambda decoder, depth: frozenset(decoder.items(depth)),
    b"b": lambda decoder, depth: decoder.block(),
    b"B": lambda decoder, depth: bytearray(decoder.block()),
    b"c": lambda decoder, depth: complex(*struct.unpack(">dd", decoder.raw(16))),
    b"r": lambda decoder, depth: range(*decoder.integers(depth)),
    b"e": _take_slice,
    b"n": _take_record,
    b"q": _take_deque,
    # Imported when needed: importing these modules for every program would take too long.
    b"m": lambda decoder, depth: __import__("decimal").Decimal(decoder.text()),
    b"x": lambda decoder, depth: __import__("fractions").Fraction(*decoder.integers(depth)),
    b"y": lambda decoder, depth: __import__("datetime").timedelta(*decoder.integers(depth)),
    b"z": lambda decoder, depth: __import__("datetime").datetime.fromisoformat(decoder.text()),
    b"a": lambda decoder, depth: __import__("datetime").date.fromisoformat(decoder.text()),
    b"w": lambda decoder, depth: __import__("datetime").time.fromisoformat(decoder.text()),
    b"T": _take_type,
    b"O": lambda decoder, depth: decoder.reference(True),
    b"R": lambda decoder, depth: decoder.reference(False),
}
