import collections
import datetime
import math
import random
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.troll_sandbox.processes import inside_module

messages, merge = inside_module("messages"), inside_module("proxy").merge


def no_reference(*_: object) -> tuple[bool, int]:
    raise AssertionError("a reference")


def copy_of(value: object) -> object:
    return messages.decode(messages.encode(value, no_reference), no_reference)


Point = collections.namedtuple("Point", "x y")
Renamed = collections.namedtuple("Renamed", "x class", rename=True)


class Angry(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


VALUES = [
    None, True, False, 0, -1, 127, 128, -128, -129, 2**63, -(2**63), 2**64, 10**5000, -(10**400),
    0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, [math.nan] * 2, 5e-324, 1j, complex(math.inf, -0.0),
    "", "text", "ä€😀", "\ud800 alone", "\0", b"", b"\xff\0", bytearray(b"x"),
    [], [1, 2], [1.5, -0.0], [True, 1, 1.0], [2**63], [1, [2, [3, []]]], (), (1,), ((), [()]), {}, {1: {2: 3}},
    {"a": [1], None: (2,), (1, 2): {3}}, set(), {1, "a", (2, 3)}, frozenset({frozenset(), 1}),
    collections.deque([1, 2], 5), collections.deque(), collections.Counter("abca"), collections.Counter({"a": -2}),
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.defaultdict(list, {1: [2]}),
    Decimal("1.10"), Decimal("NaN").copy_abs(), Decimal("-Infinity"), Fraction(-3, 7), range(0), range(5, -5, -2),
    slice(None), slice(1, -1, 2), datetime.time(1, 2), datetime.time(23, 59, 59, 5),
    datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.timedelta(-1, 2, 3),
    int, dict, type(None), object, ValueError, KeyboardInterrupt,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_decode_returns_what_encode_took(value):
    copy = copy_of(value)
    assert type(copy) is type(value)
    assert repr(copy) == repr(value) if not isinstance(value, int) else copy == value


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Angry(3), 3),
        (Renamed(1, 2), (1, 2)),
        (type("Pair", (tuple,), {"_fields": ("a", 1)})((1, 2)), (1, 2)),
        (type("Text", (str,), {"__eq__": lambda *_: True})("a"), "a"),
        (type("List", (list,), {"__iter__": lambda _: iter([9])})([1]), [1]),
        (type("Dict", (dict,), {"items": lambda _: [(9, 9)]})({1: 2}), {1: 2}),
        (np.float64(0.5), 0.5),
        (np.int32(7), 7),
        (np.bool_(True), True),
    ],
)
def test_encode_sends_a_subclass_as_its_base(value, base):
    copy = copy_of(value)
    assert type(copy) is type(base)
    assert copy == base


def test_encode_sends_references_to_what_cannot_be_copied():
    things = [object(), len, lambda: 0, iter([]), type("C", (), {}), messages, exec, type]
    numbers = {id(thing): number for number, thing in enumerate(things)}
    data = messages.encode([things, (things[3],)], lambda thing: (False, numbers[id(thing)]))
    seen = messages.decode(data, lambda yours, number: (yours, number))
    assert seen == [[(False, number) for number in range(len(things))], ((False, 3),)]
    assert messages.decode(messages.encode(len, lambda thing: (True, 5)), lambda yours, number: (yours, number)) == (
        True,
        5,
    )


def test_named_tuples_keep_their_names():
    sent: list[object] = []

    def note(thing: object) -> tuple[bool, int]:
        sent.append(thing)
        return False, 0

    data = messages.encode([Point(1, 2), (Point([3], 4),)], note)
    assert sent == [Point, Point]  # the classes, which are sent as references
    origin = object()
    first, (second,) = messages.decode(data, lambda yours, number: origin)
    assert (first, second) == ((1, 2), ([3], 4)) and (second.x, second.y) == ([3], 4)
    assert type(first) is type(second) is not Point and type(first).__name__ == "Point"
    assert type(first)._origin is origin
    back = messages.encode(first, lambda thing: (True, 5))
    own = messages.decode(back, lambda yours, number: Point)
    assert type(own) is Point and own == Point(1, 2)
    for wrong in (object, tuple, collections.namedtuple("Other", "x z")):
        with pytest.raises(messages.MessageError):
            messages.decode(back, lambda yours, number, kind=wrong: kind)


def test_encode_limits_size_and_depth(monkeypatch):
    monkeypatch.setattr(messages, "MAX_DEPTH", 200)  # within this process's recursion limit
    deep: Any = []
    for _ in range(messages.MAX_DEPTH):
        deep = [deep]
    assert copy_of(deep) == deep
    circular: list[Any] = []
    circular.append(circular)
    for value in ([deep], circular):
        with pytest.raises(messages.MessageError, match="deeper"):
            copy_of(value)
    monkeypatch.setattr(messages, "MAX_BYTES", 1000)
    for large in ("x" * 1001, [None] * 1001, [1] * 200, {k: k for k in range(200)}):
        with pytest.raises(messages.MessageError, match="bytes"):
            copy_of(large)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"X", b"N\0", b"NN", b"i\0\0\0\x05a", b"s\xff\xff\xff\xff", b"s\0\0\0\x01\xff", b"l\xff\xff\xff\xffN",
        b"S\0\0\0\x01l\0\0\0\0", b"d\0\0\0\x01l\0\0\0\0N", b"m\0\0\0\x01x", b"x\0\0\0\x02i\0\0\0\x01\x01i\0\0\0\0",
        b"r\0\0\0\x03NNN", b"r\0\0\0\x02i\0\0\0\x01\x01f" + struct.pack(">d", 1.0),
        b"q\0\0\0\0", b"q\0\0\0\x01s\0\0\0\0",
        b"T\0\0\0\x04exec", b"T\0\0\0\x04type", b"E\0\0\0\x04exec", b"T\0\0\0\x0a__import__", b"f\0", b"I\0\0\0\x01a",
        b"e\0\0\0\x01N", b"w\0\0\0\x04nope", b"n\0\0\0\x01N", b"n\0\0\0\x03Ns\0\0\0\x01at\0\0\0\x01s\0\0\0\x01_",
        b"n\0\0\0\x04Ns\0\0\0\x01at\0\0\0\0N", b"n\0\0\0\x03Ns\0\0\0\x01a;t\0\0\0\0",
        b"a\0\0\0\x04nope", b"z\0\0\0\0", b"D\xffN", b"l\0\0\0\x01" * 5000 + b"N", b"R\0", b"O" + b"\xff" * 8,
    ],
)  # fmt: skip
def test_decode_refuses_junk(data):
    with pytest.raises(messages.MessageError):
        messages.decode(data, [].__getitem__)


def test_decode_of_changed_bytes_gives_plain_data_or_an_error():
    chosen = random.Random(0)
    data = b"".join(messages.encode(value, no_reference) for value in VALUES)
    kinds = {type(value) for value in VALUES}
    for _ in range(20000):
        start = chosen.randrange(len(data))
        sample = bytearray(data[start : start + chosen.randrange(1, 60)])
        for _ in range(chosen.randrange(4)):
            sample[chosen.randrange(len(sample))] = chosen.randrange(256)
        try:
            value = messages.decode(bytes(sample), lambda yours, number: None)
        except messages.MessageError:
            continue
        assert type(value) in kinds


def test_merge_repeats_changes_in_place():
    inner, queue = [1], collections.deque([1], 3)
    mine = ([inner, 2], {"k": inner}, {1}, queue, (inner,), 5, bytearray(b"a"))
    kept = list(mine)
    theirs = ([[1, 9], 2, 3], {"k": [4], "n": 1}, {2}, collections.deque([7, 8]), ([5],), 6, bytearray())
    merged = merge(mine, theirs)
    assert merged == ([[1, 9], 2, 3], {"k": [1, 9], "n": 1}, {2}, collections.deque([7, 8]), ([1, 9],), 6, bytearray())
    assert all(a is b for a, b in zip(merged, kept, strict=True) if b != 5)
    assert all(a is b for a, b in zip(mine, kept, strict=True))
    assert mine[0][0] is inner and mine[1]["k"] is inner and inner == [1, 9]
    assert queue.maxlen == 3
    assert merge([1], (1,)) == (1,)


@pytest.mark.parametrize("place", range(3))
def test_merge_takes_the_changed_copy_of_a_repeated_container(place):
    row = [{"k": 0}]
    mine, theirs = ([row] * 3, row), ([[{"k": 0}] for _ in range(3)], [{"k": 0}])
    theirs[0][place][0]["k"] = 1
    merge(mine, theirs)
    assert mine[0][0] is row and row == [{"k": 1}]
