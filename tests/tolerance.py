"""What rounding may do to a number, and how far from it the tests stay.

Tolerances follow from the arithmetic: how many numbers are added up, how large they are, what cancels. They are not
what one machine printed, since another one adds in another order. `TROLL_TEST_MARGIN=3` divides every one of them by
three, so that a test which then still passes has a margin of three left; see `tests/portable.py`.
"""

import functools
import os
from typing import Any

import pytest
import torch

#: By how much all tolerances are divided.
MARGIN = float(os.environ.get("TROLL_TEST_MARGIN", "1"))

#: The spacing of float32 at 1: twice the error of one rounding.
EPS = torch.finfo(torch.float32).eps


def within(tolerance: float) -> float:
    """A tolerance for a comparison that neither `assert_close` nor `approx` makes."""
    return tolerance / MARGIN


def rounding(terms: int, magnitude: float = 1.0) -> float:
    """What a float32 sum of so many terms may be off by, in whatever order it is taken, if no partial sum is larger."""
    return terms * EPS * magnitude


def tighten(margin: float) -> None:
    """Divides the tolerances of `torch.testing.assert_close` and `pytest.approx`; what is compared exactly stays so.

    Called before any test is imported, since tests import these functions by name.
    """
    comparison = torch.testing._comparison
    tolerances_of, approx = comparison.get_tolerances, pytest.approx

    # All of `assert_close` goes through this, number by number of a container, after the defaults are filled in.
    @functools.wraps(tolerances_of)
    def get_tolerances(*inputs: Any, **options: Any) -> tuple[float, float]:
        rtol, atol = tolerances_of(*inputs, **options)
        return rtol / margin, atol / margin

    @functools.wraps(approx)
    def tighter(expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> Any:
        # pytest's own defaults; an absolute tolerance by itself leaves no relative one.
        if rel is None and abs is None:
            rel = 1e-6
        if abs is None:
            abs = 1e-12
        return approx(expected, None if rel is None else rel / margin, abs / margin, nan_ok)

    comparison.get_tolerances = get_tolerances
    pytest.approx = tighter
