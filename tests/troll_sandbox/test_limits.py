import math

import pytest

from troll_sandbox.limits import Limits, Outcome, printable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_seconds", 0),
        ("wall_seconds", -1.0),
        ("idle_seconds", math.inf),
        ("cpu_seconds", math.nan),
        ("cpu_seconds", "2"),
        ("cpu_seconds", True),
        ("memory_bytes", 1e9),
        ("memory_bytes", 1 << 20),
        ("disk_bytes", 0),
        ("output_bytes", 0.5),
        ("threads", False),
    ],
)
def test_limits_name_a_wrong_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("raised ValueError: né 3", "raised ValueError: né 3"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\ud800", "\\ud800"),
        ("a\nb\r\t", "a\\nb\\r\\t"),
        ("\u202eevil\u2028", "\\u202eevil\\u2028"),
        ("\U000e0001\x9b", "\\U000e0001\\x9b"),
    ],
)
def test_printable_escapes_unsafe_characters(text: str, wanted: str) -> None:
    assert printable(text) == Outcome(False, text).reason == wanted
    wanted.encode()
