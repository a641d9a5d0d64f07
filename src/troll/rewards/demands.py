"""What tests that are code need of the place where they run, as far as their text shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

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
_STAND_INS = {"BytesIO", "MagicMock", "Mock", "StringIO"}


def needs_plain(tests: CodeTests) -> list[str]:
    """The reasons why tests cannot run outside the program's process, in a few words each; empty if none is found.

    It reads only the tests' text, so it misses what depends on the program: objects that equal plain data, or objects
    that equal each other although their contents differ.
    """
    nodes = _nodes(tests)
    theirs = {*tests.names, *tests.inferred, *_parameters_of_check(nodes)}
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)} | _STAND_INS
    return list(dict.fromkeys(_reasons(nodes, theirs, own)))


def borrowed_packages(tests: CodeTests) -> list[str]:
    """Names of `PACKAGES` that the tests use without importing them: a program could define them, and decide a test."""
    return [name for name in tests.inferred if name in PACKAGES]


def _nodes(tests: CodeTests) -> list[ast.AST]:
    return [node for source in (tests.setup, *tests.tests) for node in ast.walk(parse(source))]


def _parameters_of_check(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The parameter names by which HumanEval's tests call the function that they test."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args:
            yield node.args.args[0].arg


def _reasons(nodes: Sequence[ast.AST], theirs: set[str], own: set[str]) -> Iterator[str]:
    held = own | {  # variables that hold objects of the tests' classes
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _calls(node.value, own)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.ClassDef) and (bases := _named(node.bases, theirs)):
            yield f"a class inherits from the program's {bases[0]}"
        elif isinstance(node, ast.Attribute) and node.attr in _CODE and _root(node) in theirs:
            yield f"{node.attr} of the program's {_root(node)} is read"
        elif isinstance(node, ast.Call) and _root(node.func) == "inspect" and _named(node.args, theirs):
            yield "the program's code is inspected"
        elif isinstance(node, ast.Call) and _root(node.func) in theirs and _passes(node, held, own):
            yield "the program is passed an object of a class of the tests"
        elif _is_stream(node):
            yield "what the program prints or reads is replaced"


def _is_stream(node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.arg):
        return (node.id if isinstance(node, ast.Name) else node.arg) in _STREAMS
    if isinstance(node, ast.Attribute):
        stored = isinstance(node.ctx, ast.Store)
        return node.attr in _STREAMS or (stored and node.attr in _STANDARD and _root(node) == "sys")
    return isinstance(node, ast.Constant) and node.value in (
        "builtins.input",
        "builtins.print",
        "sys.stdin",
        "sys.stdout",
    )


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
    """The name with which an expression of attributes and calls begins."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None
