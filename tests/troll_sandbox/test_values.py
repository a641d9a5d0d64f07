"""Results of functions and printed outputs are compared by the same rule for numbers."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from tests.troll_sandbox.processes import inside_module
from troll_sandbox import output

values = inside_module("values")


def passes(result: Any, expected: Any) -> bool:
    try:
        values.check(result, expected)
    except AssertionError:
        return False
    return True


NUMBERS = [
    (0.1 + 0.2, 0.3, True),
    (1 / 3, 0.333333, True),
    (0.334, 0.333, False),
    (1000000.5, 1000000.9, True),
    (1000002.5, 1000000.5, False),
    (1e-7, 0.0, True),
    (1e-5, 0.0, False),
    (-0.0, 0.0, True),
    (2, 2.0, True),
    (10**300, 1e300, True),
    (1e300, math.inf, False),
    (math.inf, 1e300, False),
    (math.inf, math.inf, True),
    (-math.inf, math.inf, False),
    (math.nan, math.nan, True),
    (math.nan, 0.5, False),
    (0.5, math.nan, False),
    (3, 3, True),
    (3.0000001, 3, False),  # an integer is expected, and is exact
    (10**20 + 1, 10**20, False),
]


@pytest.mark.parametrize(("result", "expected", "same"), NUMBERS)
def test_check_and_same_output_compare_numbers_alike(result: Any, expected: Any, same: bool) -> None:
    assert values.TOLERANCE == output.TOLERANCE == 1e-6
    assert passes(result, expected) == same
    for compare in ("tokens", "numbers") if isinstance(expected, float) else ("tokens",):
        assert output.same_output(str(result), str(expected), compare) == same
    for nested in (lambda x: [1, (x,)], lambda x: {"a": [x, "b"]}, lambda x: [[x]]):
        assert passes(nested(result), values._as_json(nested(expected))) == same


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (10**400, 1.5),
        ("0.5", 0.5),
        (None, 0.0),
        (1e-9j, 0.0),
        (True, 1.0000001),
        (Decimal("0.6"), 0.5),
        ([0.5, 1], [0.5]),
        ([[0.5]], [0.5]),
        ({"a": 0.5}, {"b": 0.5}),
        ({"a": 0.5, "b": 1}, {"a": 0.5}),
        ({1: 1, "1": 1}, {"1": 1}),
        ({None: 1, "null": 1}, {"null": 1}),
        (0.5, {"a": 0.5}),
        ({0.5}, [0.5]),
    ],
)
def test_check_rejects(result: Any, expected: Any) -> None:
    assert not passes(result, expected)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (True, 1),
        (3.0, 3),
        (Decimal("0.3333333"), 1 / 3),
        (Fraction(1, 3), 0.3333333),
        (0.5, [0.50000001]),
        ([(0.1 + 0.2,), []], [[0.3], []]),
        (
            {1.5: 0, None: [1.0000001], False: 2, True: 3, 7: 4},
            {"1.5": 0, "null": [1.0], "false": 2, "true": 3, "7": 4},
        ),
    ],
)
def test_check_accepts(result: Any, expected: Any) -> None:
    assert passes(result, expected)
