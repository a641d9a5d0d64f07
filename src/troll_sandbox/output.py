"""Compares a program's output with the expected one."""

from __future__ import annotations

import math
import re
from typing import Literal

Compare = Literal["tokens", "numbers"]

#: Numbers are equal if they differ by no more than this, absolutely or relative to the expected one.
TOLERANCE = 1e-6

#: Longer tokens are compared as texts or as integers, since a program may print one number of megabytes.
NUMBER_LENGTH = 400

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def same_output(actual: str, expected: str, compare: Compare = "tokens") -> bool:
    """Whether an output counts as the expected one.

    Blank lines at the start and at the end are ignored, and so is the amount of white space between the tokens of a
    line. Both must have the same number of lines, and of tokens in each line. Tokens are equal as texts, or as numbers
    to 1e-6 absolutely or relatively.

    Args:
        actual: The program's output.
        expected: The expected output.
        compare: Which tokens are compared as numbers. "tokens": those where the expected token is a decimal fraction
            or has an exponent, so an expected integer is a text. "numbers": those where both are numbers, so `3.0` is
            `3`. Two integers are compared exactly, however large.
    """
    ours, theirs = (text.strip().split("\n") for text in (actual, expected))
    return len(ours) == len(theirs) and all(_same_line(*lines, compare) for lines in zip(ours, theirs, strict=True))


def _same_line(actual: str, expected: str, compare: Compare) -> bool:
    ours, theirs = actual.split(), expected.split()
    return len(ours) == len(theirs) and all(_same_token(*pair, compare) for pair in zip(ours, theirs, strict=True))


def _same_token(actual: str, expected: str, compare: Compare) -> bool:
    if actual == expected:
        return True
    whole = _INTEGER.fullmatch(expected) is not None
    if whole and (compare == "tokens" or _INTEGER.fullmatch(actual)):
        return compare == "numbers" and _digits(actual) == _digits(expected)
    if not (_is_number(expected) and _is_number(actual)):
        return False
    value, target = float(actual), float(expected)
    # Relative to infinity every number is close, so a number too large for a float equals only its own text.
    return math.isfinite(target) and abs(value - target) <= TOLERANCE * max(1.0, abs(target))


def _digits(integer: str) -> str:
    """An integer of any length, without plus and leading zeros."""
    digits = integer.lstrip("+-").lstrip("0")
    return f"-{digits}" if digits and integer[0] == "-" else digits


def _is_number(token: str) -> bool:
    return len(token) <= NUMBER_LENGTH and _NUMBER.fullmatch(token) is not None
