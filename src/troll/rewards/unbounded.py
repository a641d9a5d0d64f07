"""JSON and Python source of the user's, without what CPython limits for the sake of servers.

Tests may hold integers of any length, and lists in lists. Both limits are the whole process's, so they are lifted only
while one text is read or written.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: How deep JSON may be nested; C takes 200 bytes of the stack for each level.
DEPTH = 20_000

_lock = threading.RLock()


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text, which may have `NaN` and `Infinity` as Python writes them.

    Raises:
        ValueError: It is no JSON, or nested deeper than `DEPTH` levels.
    """
    try:
        with _lifted(DEPTH):
            return json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None


def write_json(value: Any) -> str:
    """The JSON text of a value that `read_json` returned, or of parts of it."""
    with _lifted(DEPTH + 100):
        return json.dumps(value)


def parse(source: str) -> ast.Module:
    """The syntax tree of a source, without warnings about it.

    Raises:
        SyntaxError, ValueError, RecursionError: As `ast.parse`.
    """
    # The depth of source stays limited: the compiler would take more of the stack than there is.
    with _lifted(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python will refuse one day
        return ast.parse(source)


@contextmanager
def _lifted(depth: int) -> Iterator[None]:
    with _lock:
        digits, recursion = sys.get_int_max_str_digits(), sys.getrecursionlimit()
        sys.set_int_max_str_digits(0)
        sys.setrecursionlimit(max(recursion, depth))
        try:
            yield
        finally:
            sys.setrecursionlimit(recursion)
            sys.set_int_max_str_digits(digits)
