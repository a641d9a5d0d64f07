"""What a number in the settings may be, and settings that arrive as a dictionary."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from troll.settings import RANGES, check_fields, number, parse

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Nested:
    size: int = number(1, "an integer, at least 1")


@dataclass(frozen=True)
class Settings:
    rate: float = number(0.5, "in (0, 1]")
    target: float | None = number(None, "finite and above 0")
    word: Literal["one", "two"] = "one"
    steps: int = number(0, "an integer, at least 0")
    on: bool = False
    path: str | None = None
    text: str = ""
    goal: float | None = number(0.3, "in (0, 1]")
    other: Literal["one", "two"] | None = None
    texts: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    mapping: dict[str, Any] = field(default_factory=dict)
    part: Nested | None = None
    anything: Any = 0


def parsed(given: Any) -> Settings:
    return parse(Settings, given, "part_kwargs", "the part")


def test_parse_fills_in_defaults_and_makes_numbers_floats() -> None:
    assert parsed(None) == parsed({}) == Settings()
    settings = parsed({"rate": 1, "target": 2, "word": "two", "steps": 3, "on": True, "path": "there"})
    assert settings == Settings(1.0, 2.0, "two", 3, True, "there")
    assert type(settings.rate) is type(settings.target) is float and type(settings.steps) is int
    none = parsed({"target": None, "path": None, "goal": None, "other": None, "part": None, "anything": None})
    assert none == Settings(goal=None, anything=None)
    assert type(parsed({"anything": 3}).anything) is int  # a field that says nothing takes everything as it is
    assert type(parsed({"steps": 1e3}).steps) is int


def test_parse_takes_texts_lists_mappings_and_parts() -> None:
    given = {
        "text": "a",
        "texts": ["b"],
        "pairs": [["c", "d"]],
        "names": {"e": "f"},
        "mapping": {"g": 1},
        "other": "two",
    }
    settings = parsed({**given, "part": {"size": 2}})
    assert settings == Settings(**given, part=Nested(2))  # type: ignore[arg-type]
    assert [getattr(settings, name) for name in given] == list(given.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rate", "part_kwargs must be a JSON object, got 'rate'"),
        ({"rat": 1}, r"part_kwargs: the part has no setting 'rat', did you mean rate\?"),
        ({"zzz": 1}, "the part has no setting 'zzz'; it has rate, target, word, steps, on, path, "),
        ({"rate": 0}, r"part_kwargs: rate of the part must be in \(0, 1\], got 0"),
        ({"rate": None}, r"rate of the part must be in \(0, 1\], got None"),
        ({"rate": True}, r"rate of the part must be in \(0, 1\], got True"),
        ({"rate": "1"}, r"rate of the part must be in \(0, 1\], got '1'"),
        ({"word": "three"}, "word of the part must be one of one, two, got 'three'"),
        ({"steps": -1}, "steps of the part must be an integer, at least 0, got -1"),
        ({"steps": True}, "steps of the part must be an integer, at least 0, got True"),
        ({"steps": 1.5}, "steps of the part must be an integer, at least 0, got 1.5"),
        ({"steps": INF}, "steps of the part must be an integer, at least 0, got inf"),
        ({"on": 1}, "on of the part must be true or false, got 1"),
        ({"on": None}, "on of the part must be true or false, got None"),
        ({"path": 3}, "path of the part must be a text, got 3"),
        ({"text": None}, "text of the part must be a text, got None"),
        ({"goal": "half"}, r"goal of the part must be in \(0, 1\], got 'half'"),
        ({"other": ["two"]}, r"other of the part must be one of one, two, got \['two'\]"),
        ({"texts": "b"}, "texts of the part must be a list of texts, got 'b'"),
        ({"texts": ["b", 3]}, r"texts of the part must be a list of texts, got \['b', 3\]"),
        ({"pairs": [["b", "c"], ["d"]]}, "pairs of the part must be a list of pairs of texts, such as"),
        ({"pairs": [["b", 3]]}, "pairs of the part must be a list of pairs of texts, such as"),
        ({"names": ["a"]}, "names of the part must be a mapping of names, such as"),
        ({"names": {"a": 3}}, "names of the part must be a mapping of names, such as"),
        ({"names": None}, "names of the part must be a mapping of names, such as"),
        ({"mapping": 2}, "mapping of the part must be a mapping, got 2"),
        ({"part": 2}, "part_kwargs.part must be a JSON object, got 2"),
        ({"part": {"sise": 2}}, r"part_kwargs.part: the part has no setting 'sise', did you mean size\?"),
        ({"part": {"size": 0}}, "part_kwargs.part: size of the part must be an integer, at least 1, got 0"),
    ],
)
def test_parse_refuses_what_a_field_does_not_take(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(given)


def test_check_fields_names_the_field() -> None:
    check_fields(Settings(goal=None))
    with pytest.raises(ValueError, match=r"^goal must be in \(0, 1\], got 30$"):
        check_fields(Settings(goal=30))
    with pytest.raises(ValueError, match=r"^word must be one of one, two, got 'three'$"):
        check_fields(Settings(word="three"))  # type: ignore[arg-type]


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
        ("in (0, 1)", [0.1, 0.9], [0, 1]),
        ("an integer, at least 0", [0, 3], [-1, 1.5]),
        ("an integer, at least 1", [1, 3], [0, 1.5]),
    ],
)
def test_ranges(takes: str, accepted: list[float], refused: list[float]) -> None:
    assert [RANGES[takes](value) for value in accepted] == [True] * len(accepted)
    assert [RANGES[takes](value) for value in [*refused, NAN]] == [False] * (len(refused) + 1)
