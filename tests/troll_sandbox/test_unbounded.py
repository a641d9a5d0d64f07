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
def test_write_json_returns_what_read_json_read(text):
    assert write_json(read_json(text)) == text


def test_read_json_takes_the_deepest_text_in_a_thread():
    def nested() -> None:
        deepest = DEPTH - 100
        found.append(write_json(read_json('{"a":' * deepest + "1" + "}" * deepest)))

    found: list[str] = []
    thread = threading.Thread(target=nested)
    thread.start()
    thread.join()
    assert found


@pytest.mark.parametrize("text", ["[" * 30_000, "", "{", "[1,"])
def test_read_json_refuses_other_text(text):
    with pytest.raises(ValueError, match="nested deeper" if len(text) > 10 else "Expecting"):
        read_json(text)


def test_parse_takes_long_numbers_and_refuses_deep_sources():
    assert len(parse(f"x = {DIGITS}\ny = '\\d'").body) == 2
    with pytest.raises((RecursionError, MemoryError, SyntaxError)):
        parse("x = " + "1+" * 100_000 + "1")
    with pytest.raises(SyntaxError):
        parse("x = (")
