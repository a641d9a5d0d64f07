"""Arguments and results of functions whose tests are JSON, which has no tuples, and only texts as keys.

This module imports no other module of this package, because a server gets it as text; see `fusion.py`.
"""

import re
from math import isfinite
from numbers import Number
from typing import Any

#: The same as for printed numbers in `troll_sandbox.output`.
TOLERANCE = 1e-6

_INTEGER = re.compile(r"0|-?[1-9]\d{0,300}", re.ASCII)


def check(result: Any, expected: Any) -> None:
    """Compares a function's result with the expected one.

    Raises:
        AssertionError: They differ, or two keys of a dictionary are the same text in JSON.
    """
    result, expected = _as_json(result), _as_json(expected)
    wanted = [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]
    if not any(result == each or _same(result, each) for each in wanted):
        raise AssertionError


def integer_keys(value: Any) -> Any:
    """The value with integers as keys in every dictionary, at any depth, whose keys are all texts of integers."""
    if isinstance(value, list):
        return [integer_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    whole = all(_INTEGER.fullmatch(key) for key in value)
    return {int(key) if whole else key: integer_keys(item) for key, item in value.items()}


def _same(result: Any, expected: Any) -> bool:
    """Whether a result and all its parts equal the expected ones, floats up to `TOLERANCE`."""
    if type(expected) is list:
        return type(result) is list and len(result) == len(expected) and all(map(_same, result, expected))
    if type(expected) is dict:
        alike = type(result) is dict and result.keys() == expected.keys()
        return alike and all(_same(result[key], item) for key, item in expected.items())
    return result == expected or (type(expected) is float and _is_close(result, expected))


def _is_close(result: Any, expected: float) -> bool:
    if isinstance(result, bool) or not isinstance(result, Number):
        return False
    try:
        value = float(result)  # type: ignore[arg-type]
    except (ArithmeticError, TypeError, ValueError):  # a complex number, or too large for a float
        return False
    if expected != expected:
        return value != value
    # Relative to infinity every number is close.
    return isfinite(expected) and abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def _as_json(value: Any) -> Any:
    """The value as JSON would have it: lists for tuples, texts for keys."""
    kind = type(value)  # not `__class__`, which a proxy asks the program for
    if issubclass(kind, list | tuple):
        return [_as_json(item) for item in value]
    if not issubclass(kind, dict):
        return value
    found = {_key(key): _as_json(item) for key, item in value.items()}
    if len(found) != len(value):
        raise AssertionError
    return found


def _key(key: Any) -> Any:
    if key is None or type(key) is bool:
        return {None: "null", True: "true", False: "false"}[key]
    return str(key) if type(key) in (int, float) else key
