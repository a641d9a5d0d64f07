"""What a number in the settings may be, and settings that arrive as a dictionary."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from troll.settings import RANGES, number, parse


@dataclass(frozen=True)
class Settings:
    rate: float = number(0.5, "in (0, 1]")
    target: float | None = number(None, "finite and above 0")
    word: Literal["one", "two"] = "one"
    steps: int = number(0, "an integer, at least 0")
    on: bool = False
    path: str | None = None


def parsed(given: Any) -> Settings:
    return parse(Settings, given, "part_kwargs", "the part")


def test_parse_fills_in_defaults_and_makes_numbers_floats() -> None:
    assert parsed(None) == parsed({}) == Settings()
    settings = parsed({"rate": 1, "target": 2, "word": "two", "steps": 3, "on": True, "path": "there"})
    assert settings == Settings(1.0, 2.0, "two", 3, True, "there")
    assert type(settings.rate) is type(settings.target) is float and type(settings.steps) is int
    assert parsed({"target": None}).target is None
    assert type(parsed({"path": 3}).path) is int  # a field that says nothing takes everything as it is


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate", "part_kwargs must be a JSON object, got 'rate'"),
        ({"rat": 1}, r"part_kwargs: the part has no setting 'rat', did you mean rate\?"),
        ({"zzz": 1}, "the part has no setting 'zzz'; it has rate, target, word, steps, on, path"),
        ({"rate": 0}, r"part_kwargs: rate of the part must be in \(0, 1\], got 0"),
        ({"rate": None}, r"rate of the part must be in \(0, 1\], got None"),
        ({"rate": True}, r"rate of the part must be in \(0, 1\], got True"),
        ({"rate": "1"}, r"rate of the part must be in \(0, 1\], got '1'"),
        ({"word": "three"}, "word of the part must be one of one, two, got 'three'"),
        ({"steps": -1}, "steps of the part must be an integer, at least 0, got -1"),
        ({"steps": True}, "steps of the part must be an integer, at least 0, got True"),
        ({"on": 1}, "on of the part must be true or false, got 1"),
    ],
)
def test_parse_refuses_what_a_field_does_not_take(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(given)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("takes", "accepted", "refused"),
    [
        ("above 0", [1e-9, INF], [0, -1]),
        ("above 1", [1.1, INF], [1]),
        ("at least 1", [1, INF], [0.9]),
        ("finite and above 0", [1e-9, 5], [0, INF]),
        ("finite and at least 0", [0, 5], [-1e-9, INF]),
        ("in [0, 1]", [0, 1], [-0.1, 1.1]),
        ("in (0, 1]", [0.1, 1], [0, 1.1]),
        ("in [0, 1)", [0, 0.9], [-0.1, 1]),
        ("an integer, at least 0", [0, 3], [-1, 1.5]),
        ("an integer, at least 1", [1, 3], [0, 1.5]),
    ],
)
def test_ranges(takes: str, accepted: list[float], refused: list[float]) -> None:
    assert [RANGES[takes](value) for value in accepted] == [True] * len(accepted)
    assert [RANGES[takes](value) for value in [*refused, NAN]] == [False] * (len(refused) + 1)
