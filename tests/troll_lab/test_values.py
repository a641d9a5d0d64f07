"""Values that people write, as YAML 1.2 reads them."""

import json
import math
from argparse import ArgumentTypeError

import pytest

from troll_lab.values import number, parsed, read_value, read_yaml, whole_number, yaml_text

#: Plain scalars and their values in YAML 1.2's core schema (yaml.org/spec/1.2.2, section 10.3.2).
SCALARS = {
    "1e-1": 0.1,
    ".5": 0.5,
    "-.5E+1": -5.0,
    "+1e-3": 1e-3,
    "1e5": 1e5,
    "1.": 1.0,
    "+5": 5,
    "0o14": 12,
    "010": 10,
    "0x1F": 31,
    "12345678901234567890": 12345678901234567890,
    ".inf": math.inf,
    "-.Inf": -math.inf,
    "true": True,
    "FALSE": False,
    "null": None,
    "~": None,
    **{
        text: text
        for text in (
            *("1_000", "0b11", "1:30", "-0o7", "+0x1", "1e", ".", "+", "tRue", "2024-05-01"),
            *("yes", "no", "on", "off", "y", "n", "=", "<<"),
        )
    },
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_read_as_in_yaml_1_2(text, value):
    found = [parsed(f"a: {text}")["a"], parsed(f"[{text}, x]")[0], read_value(text)]
    assert [(type(one), one) for one in found] == [(type(value), value)] * 3


def test_a_value_of_the_command_line_is_json_a_number_or_itself():
    words = ("", "Question: {question}", "{question}", "[draft] x", "# x", "- x", "*x", "5 # x", "a\n\nb", "'x'")
    assert [read_value(word) for word in words] == list(words)
    assert read_value('{"a": [1e-1, "\\ud83d\\ude00"]}') == {"a": [0.1, "😀"]}
    assert (read_value('"5"'), read_value("-.5")) == ("5", -0.5)


@pytest.mark.parametrize("text", ["a: 1\na: 2", "b: {a: 1, c: 3, a: 2}", '{"a": 1, "a": 2}', "a: 1\nb: 2\n? a\n: 3"])
def test_a_key_that_is_there_twice_is_named(tmp_path, text):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"twice\.yaml: not YAML \(found duplicate key.*\ba\b") as error:
        read_yaml(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "a: !!int 1e3", "a: b: c", "\ta: 1", "a: 1\n---\nb: 2", "a: \x07", '{"a": 1'),
        *(
            "a: !!bool yes",
            "a: !!null x",
            "a: !!float x",
            "a: !!python/name:os.system",
            "a: &x {b: *x}",
            "a: &x [[*x]]",
        ),
        *(f"a: {'[' * 5000}{']' * 5000}", f'{{"a": {"[" * 200_000}{"]" * 200_000}}}'),
    ],
)
def test_what_is_no_yaml_is_one_line_with_the_file(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.yaml: not YAML \(") as error:
        read_yaml(path)
    assert "\n" not in str(error.value)


def test_settings_are_written_so_that_the_same_values_are_read(tmp_path):
    texts = [text for text in (*SCALARS, "", "a: b", "a\nb", "'", "null", "1e-05") if isinstance(text, str)]
    settings = {"z": 1e-5, "texts": texts, "inner": {"a": [0.1, None, True, math.inf]}, "whole": 10**20, "e": {}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml_text(settings))
    assert read_yaml(path) == settings
    assert list(read_yaml(path)) == list(settings)


def test_number_takes_numbers_and_their_texts():
    words = ("1e-1", ".5", "+1e-3", "0o14", "inf", "-.inf", "Infinity", 3, 0.25)
    assert [number(word) for word in words] == [0.1, 0.5, 1e-3, 12.0, math.inf, -math.inf, math.inf, 3, 0.25]
    assert math.isnan(number("nan"))
    for value in ("1_000", "yes", "true", "", "1:30", True, None, [1], "1" + 400 * "0"):
        with pytest.raises(ArgumentTypeError, match="must be a number"):
            number(value)


def test_whole_number_takes_whole_numbers_and_their_texts():
    assert [whole_number(value) for value in ("7", "1e3", "010", "-0", 64, 64.0)] == [7, 1000, 10, 0, 64, 64]
    for value in ("1.5", "1_000", "x", "true", ".inf", 1.5, True, math.nan, None):
        with pytest.raises(ArgumentTypeError, match="must be a whole number, got"):
            whole_number(value)


def test_json_is_read_alike_whether_it_is_a_recipe_or_an_option(tmp_path):
    value = {"a": 1e-7, "b": [12345678901234567890, "😀\t", True, None], "c": {"d": -0.0}}
    for text in (json.dumps(value), json.dumps(value, indent="\t")):
        (tmp_path / "x.yaml").write_text(text)
        assert read_yaml(tmp_path / "x.yaml") == parsed(text) == read_value(text) == value
