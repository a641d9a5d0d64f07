from __future__ import annotations

import sys
import threading

import pytest

from troll_sandbox.unbounded import DEPTH, parse, read_json, write_json

DIGITS = "7" * 5000


@pytest.fixture(autouse=True)
def limits_as_before():
    before = sys.get_int_max_str_digits(), sys.getrecursionlimit()
    yield
    assert (sys.get_int_max_str_digits(), sys.getrecursionlimit()) == before


@pytest.mark.parametrize(
    "text", [DIGITS, f'{{"a": [-{DIGITS}, 1.5, NaN, -Infinity, "\\ud800"]}}', "[" * 9000 + "]" * 9000]
)
def test_what_is_read_is_written_as_it_was(text):
    assert write_json(read_json(text)) == text


def test_threads_have_room_for_the_deepest():
    def nested() -> None:
        deepest = DEPTH - 100
        found.append(write_json(read_json('{"a":' * deepest + "1" + "}" * deepest)))

    found: list[str] = []
    thread = threading.Thread(target=nested)
    thread.start()
    thread.join()
    assert found


@pytest.mark.parametrize("text", ["[" * 30_000, "", "{", "[1,"])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="nested deeper" if len(text) > 10 else "Expecting"):
        read_json(text)


def test_a_source_with_a_long_number_is_parsed_and_a_deep_one_is_refused():
    assert len(parse(f"x = {DIGITS}\ny = '\\d'").body) == 2
    with pytest.raises((RecursionError, MemoryError, SyntaxError)):
        parse("x = " + "1+" * 100_000 + "1")
    with pytest.raises(SyntaxError):
        parse("x = (")
