"""Finds out from the text of tests that are code whether they need the program's process or packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from troll_sandbox.cases import CodeTests
from troll_sandbox.unbounded import parse

#: Names of packages in tests. If the tests do not import one, the program may define something of that name.
PACKAGES = {
    "mock": "from unittest import mock", "mpmath": "import mpmath", "np": "import numpy as np",
    "numpy": "import numpy", "nx": "import networkx as nx", "pandas": "import pandas", "pd": "import pandas as pd",
    "pytest": "import pytest", "scipy": "import scipy", "sp": "import sympy as sp", "sympy": "import sympy",
    "torch": "import torch",
}  # fmt: skip

_CODE = {"__bases__", "__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__mro__"}
_STREAMS = {"capfd", "capsys", "monkeypatch", "redirect_stderr", "redirect_stdout"}
_STANDARD = {"stderr", "stdin", "stdout"}
_PATCHED = ("builtins.input", "builtins.print", "sys.stdin", "sys.stdout")
_STAND_INS = {"BytesIO", "MagicMock", "Mock", "StringIO"}


def needs_plain(tests: CodeTests) -> list[str]:
    """The reasons why tests cannot run outside the program's process, in a few words each; empty if none is found.

    It reads only the tests' text, so it misses what depends on the program: objects that equal plain data, or objects
    that equal each other although their contents differ.
    """
    nodes = [node for source in (tests.setup, *tests.tests) for node in ast.walk(parse(source))]
    theirs = {*tests.names, *tests.inferred}
    # HumanEval's tests call the function that they test by the name of their parameter.
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    theirs |= {node.args.args[0].arg for node in functions if node.name == "check" and node.args.args}
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)} | _STAND_INS
    held = own | {  # variables that hold objects of the tests' classes
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _calls(node.value, own)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    reasons = (_reason(node, theirs, held, own) for node in nodes)
    return list(dict.fromkeys(reason for reason in reasons if reason))


def borrowed_packages(tests: CodeTests) -> list[str]:
    """Names of `PACKAGES` that tests use without importing them: a program could define them to fake a pass."""
    return [name for name in tests.inferred if name in PACKAGES]


def _reason(node: ast.AST, theirs: set[str], held: set[str], own: set[str]) -> str | None:
    if isinstance(node, ast.ClassDef) and (bases := _named(node.bases, theirs)):
        return f"a class inherits from the program's {bases[0]}"
    if isinstance(node, ast.Attribute) and node.attr in _CODE and _root(node) in theirs:
        return f"{node.attr} of the program's {_root(node)} is read"
    if isinstance(node, ast.Call) and _root(node.func) == "inspect" and _named(node.args, theirs):
        return "the program's code is inspected"
    if isinstance(node, ast.Call) and _root(node.func) in theirs and _passes(node, held, own):
        return "the program is passed an object of a class of the tests"
    if _is_stream(node):
        return "what the program prints or reads is replaced"
    return _changed_state(node)


def _changed_state(node: ast.AST) -> str | None:
    """What the tests change in their own process, which a program in another one does not see."""
    if isinstance(node, ast.Subscript):
        is_read = isinstance(node.ctx, ast.Load) or ast.unparse(node.value) != "os.environ"
        return None if is_read else "the environment is changed"
    if not isinstance(node, ast.Call):
        return None
    function = ast.unparse(node.func)
    modes = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    if function in ("os.chdir", "os.putenv", "os.environ.update", "os.environ.setdefault", "os.environ.pop"):
        return "the environment is changed"
    if re.fullmatch(r"(?:(?:unittest\.)?mock\.)?patch(?:\.object|\.dict)?", function):
        return None if any(map(_is_stream, node.args)) else "a name is patched"
    is_written = function.endswith((".write_text", ".write_bytes")) or (function == "open" and any(map(_writes, modes)))
    return "a file is written" if is_written else None


def _writes(mode: ast.AST) -> bool:
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(set(mode.value) & set("wax"))


def _is_stream(node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.arg):
        return (node.id if isinstance(node, ast.Name) else node.arg) in _STREAMS
    if isinstance(node, ast.Attribute):
        stored = isinstance(node.ctx, ast.Store)
        return node.attr in _STREAMS or (stored and node.attr in _STANDARD and _root(node) == "sys")
    return isinstance(node, ast.Constant) and node.value in _PATCHED


def _passes(call: ast.Call, held: set[str], own: set[str]) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any((isinstance(value, ast.Name) and value.id in held - own) or _calls(value, own) for value in values)


def _calls(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return (node.func.attr if isinstance(node.func, ast.Attribute) else _root(node.func)) in names


def _named(nodes: Iterable[ast.AST], names: set[str]) -> list[str]:
    return [node.id for node in nodes if isinstance(node, ast.Name) and node.id in names]


def _root(node: ast.AST) -> str | None:
    """The name at the start of an expression of attributes and calls."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None
