"""JSON and source code without two limits that CPython sets to protect servers: depth of JSON, digits of integers.

Both limits belong to the process, so they are lifted only while one text is read or written.
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
    """The value of a JSON text; raises `ValueError` if it is not JSON, or is nested deeper than `DEPTH` levels."""
    with _lifted(DEPTH):
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError(f"nested deeper than {DEPTH} levels") from None


def write_json(value: Any) -> str:
    """The JSON text of a value that holds values from `read_json`."""
    with _lifted(DEPTH + 100):
        return json.dumps(value)


def parse(source: str) -> ast.Module:
    """The syntax tree of a source. The recursion limit stays as it is, because the compiler needs more stack."""
    with _lifted(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that a later Python will refuse
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
