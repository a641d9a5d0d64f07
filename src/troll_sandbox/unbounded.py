"""JSON and source of tests, without what CPython limits for the sake of servers: the depth of JSON, digits of integers.

Both limits are the whole process's, so they are lifted only while one text is read or written.
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

#: How deep JSON may be nested: a thread's stack has room for twice as much.
DEPTH = 20_000

_lock = threading.RLock()


def read_json(text: str) -> Any:
    """The value of a JSON text; a `ValueError` says that it is none, or nested deeper than `DEPTH` levels."""
    with _lifted(DEPTH):
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError(f"nested deeper than {DEPTH} levels") from None


def write_json(value: Any) -> str:
    """The JSON text of a value of which `read_json` has returned parts."""
    with _lifted(DEPTH + 100):
        return json.dumps(value)


def parse(source: str) -> ast.Module:
    """The syntax tree of a source, as `ast.parse` returns it; as deep as usual, for its compiler needs more stack."""
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
