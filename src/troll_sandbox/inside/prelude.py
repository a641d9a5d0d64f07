"""Names that starter code such as LeetCode's uses without an import: `def f(self, nums: List[int])`.

They are added to the program's builtins: the program's own definitions take precedence, and its module has no further
names. This module imports no other module of this package, because a server gets it as text; see `fusion.py`.
"""

from __future__ import annotations

import _symtable  # `symtable` takes longer to import
import builtins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ("ListNode", "TreeNode")

#: These modules are provided, and all names that they export. If two have the same name, the first counts.
MODULES = (
    "collections", "typing", "functools", "itertools", "heapq", "bisect", "math", "operator", "string", "copy",
    "random", "re", "datetime", "dataclasses", "statistics", "fractions", "decimal", "enum", "json", "time", "sys",
    __name__,
)  # fmt: skip


class ListNode:
    """LeetCode's linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


class TreeNode:
    """LeetCode's binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


def is_provided(job: dict[str, Any]) -> bool:
    """Whether a program gets these names: if one function is called, or if the tests use a class `Solution`."""
    return "function" in job or "Solution" in (*job["names"], *job["inferred"])


def execute(source: str, name: str, space: dict[str, Any], provided: bool) -> None:
    """Runs a module's source in `space`; if `provided`, with the names of judges."""
    code = compile(source, name, "exec", dont_inherit=True)
    if provided and (found := dict(_found(source))):
        space["__builtins__"] = found | vars(builtins)
    exec(code, space)


def _found(source: str) -> Iterator[tuple[str, Any]]:
    """The provided names that a program uses and that neither it nor Python defines."""
    waiting = [_symtable.symtable(source, "", "exec")]
    defined = {name for name, flags in waiting[0].symbols.items() if flags & _symtable.DEF_BOUND}
    used = set[str]()
    while waiting:
        table = waiting.pop()
        scopes = {name: flags >> _symtable.SCOPE_OFF & _symtable.SCOPE_MASK for name, flags in table.symbols.items()}
        used.update(name for name, scope in scopes.items() if scope == _symtable.GLOBAL_IMPLICIT)
        waiting += table.children
    for name in used - defined - vars(builtins).keys():
        if name in MODULES:
            yield name, __import__(name)
            continue
        for module in map(__import__, MODULES):
            if name in getattr(module, "__all__", vars(module)) and not name.startswith("_"):
                yield name, getattr(module, name)
                break
