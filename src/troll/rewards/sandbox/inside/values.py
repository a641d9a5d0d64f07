"""Arguments and results of functions whose tests came as JSON, which has neither tuples nor keys but texts.

Imports nothing of ours, for a server gets it as text; see `fusion.py`.
"""

import re
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9]\d{0,300}", re.ASCII)


def check(result: Any, expected: Any) -> None:
    """Compares what a function returned with what its test expects.

    Raises:
        AssertionError: They differ, or two keys of a dictionary are one in JSON.
    """
    result, expected = _as_json(result), _as_json(expected)
    wrapped = isinstance(expected, list) and len(expected) == 1 and result == expected[0]
    if not (wrapped or result == expected):
        raise AssertionError


def integer_keys(value: Any) -> Any:
    """The value, with integers for the keys of dictionaries that have only texts of integers, down to its parts."""
    if isinstance(value, list):
        return [integer_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    whole = all(_INTEGER.fullmatch(key) for key in value)
    return {int(key) if whole else key: integer_keys(item) for key, item in value.items()}


def _as_json(value: Any) -> Any:
    """The value as JSON has it, down to its parts: lists for tuples, texts for integers that are keys."""
    kind = type(value)  # of a proxy, not what the program calls its class
    if issubclass(kind, list | tuple):
        return [_as_json(item) for item in value]
    if not issubclass(kind, dict):
        return value
    found = {str(key) if type(key) is int else key: _as_json(item) for key, item in value.items()}
    if len(found) != len(value):
        raise AssertionError
    return found
