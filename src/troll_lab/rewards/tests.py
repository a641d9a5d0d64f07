"""The tests of a task, from the text in the data set."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, get_args

from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests, Tests
from troll_sandbox.output import Compare
from troll_sandbox.unbounded import parse, read_json

_FIELDS = (
    ({"asserts"}, {"setup", "names", "plain"}),
    ({"check", "entry_point"}, {"setup", "plain"}),
    ({"function", "inputs", "outputs"}, set[str]()),
    ({"inputs", "outputs"}, {"compare"}),
)


#: What runs the methods of a `TestCase` and only prints which of them failed.
_RUNNERS = {"unittest.main", "unittest.TextTestRunner", "TextTestRunner"}
#: What tells of a runner's failures.
_RESULTS = {"wasSuccessful", "failures", "errors"}


def parse_tests(text: str) -> Tests:
    r"""Reads the tests of a task from a cell of the column `tests`.

    They are a JSON object in one of these forms, of which `setup`, `names`, `plain` and `compare` may be left out:

    - `{"asserts": ["assert f(1) == 2"], "setup": "import math", "names": ["f"], "plain": false}`
    - `{"check": "def check(candidate): ...", "entry_point": "f", "setup": "...", "plain": false}`
    - `{"function": "f", "inputs": [[1]], "outputs": [2]}`, with a list of arguments per call
    - `{"inputs": ["1\n"], "outputs": ["2\n"], "compare": "tokens"}`, with standard input and standard output

    Args:
        text: The JSON object.

    Returns:
        The first two forms as [CodeTests][troll_sandbox.CodeTests], the third as
        [FunctionTests][troll_sandbox.FunctionTests], the last as [StreamTests][troll_sandbox.StreamTests].

    Raises:
        ValueError: The text is none of these; the message says what is wrong with it.
    """
    if not isinstance(text, str):
        raise ValueError(f"tests take a JSON object as text, got {type(text).__name__}: {str(text)[:40]!r}")
    return _parsed_tests(text)


@lru_cache(maxsize=128)  # the prompts of a rollout's batch; the tests of one may take megabytes
def _parsed_tests(text: str) -> Tests:
    try:
        case = read_json(text)
    except ValueError as error:
        raise ValueError(f"tests take a JSON object as text, got {str(text)[:40]!r} ({error})") from None
    if not isinstance(case, dict):
        raise ValueError(f"tests take a JSON object, got {type(case).__name__}")
    for required, optional in _FIELDS:
        if required <= set(case) <= required | optional:
            break
    else:
        forms = "; ".join(", ".join(sorted(required)) for required, _ in _FIELDS)
        raise ValueError(f"tests have the fields {sorted(case)}, but must have one of: {forms}")
    if "asserts" in case:
        return _code_tests(_texts(case, "asserts"), case, _texts(case, "names") if case.get("names") else ())
    if "check" in case:
        entry_point = _text(case, "entry_point")
        if not entry_point.isidentifier():
            raise ValueError(f"entry_point takes the name of a function, got {entry_point!r}")
        return _code_tests((f"{_text(case, 'check')}\ncheck({entry_point})\n",), case, (entry_point,))
    if "function" in case:
        return FunctionTests(_text(case, "function"), *_pairs(case, list))
    compare = case.get("compare", "tokens")
    if compare not in get_args(Compare):
        raise ValueError(f"compare takes one of {', '.join(get_args(Compare))}, got {str(compare)[:40]!r}")
    return StreamTests(*_pairs(case, str), compare)


def _code_tests(tests: tuple[str, ...], case: dict[str, Any], names: tuple[str, ...]) -> CodeTests:
    setup, plain = _text(case, "setup", ""), case.get("plain", False)
    if not isinstance(plain, bool):
        raise ValueError(f"plain takes true or false, got {str(plain)[:40]!r}")
    trees = [_parsed(setup, "setup"), *(_parsed(test, f"test {index}") for index, test in enumerate(tests))]
    _require_checks(trees[1:])
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = {name for node in nodes for name in _bound_names(node)} | set(names)
    through_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    inferred: dict[str, bool] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in bound and not hasattr(builtins, node.id):
            only_module = node.id in sys.stdlib_module_names and id(node) in through_attributes
            inferred[node.id] = inferred.get(node.id, True) and only_module
    modules = tuple(name for name, only_module in inferred.items() if only_module)
    others = tuple(name for name, only_module in inferred.items() if not only_module)
    return CodeTests(tests, setup, names, others, modules, plain)


def _require_checks(tests: Sequence[ast.Module]) -> None:
    """Refuses tests that every program passes, since nothing calls them or they report their failures by printing."""
    if all(_only_defines(statement) for tree in tests for statement in tree.body):
        raise ValueError("the tests run nothing, so that every program would pass them: call what they define")
    for index, tree in enumerate(tests):
        later = {node.id for each in tests[index:] for node in ast.walk(each) if isinstance(node, ast.Name)}
        for statement in tree.body:
            name = _test_name(statement)
            if name is not None and name not in later:
                raise ValueError(f"test {index} defines {name}, and nothing runs it: call it")
        running = [node for part in tree.body if not _only_defines(part) for node in ast.walk(part)]
        runners = {ast.unparse(node) for node in running if isinstance(node, ast.Attribute | ast.Name)} & _RUNNERS
        if runners and not _RESULTS & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}:
            raise ValueError(f"test {index} uses {runners.pop()}, whose failures do not raise: call the tests' methods")


def _test_name(statement: ast.stmt) -> str | None:
    """The name of a function or a class that pytest or unittest would run; None for other statements."""
    match statement:
        case (
            ast.FunctionDef(name=name, decorator_list=[])
            | ast.AsyncFunctionDef(name=name, decorator_list=[])
            | ast.ClassDef(name=name)
        ) if name.lower().startswith("test"):
            return name
    return None


def _only_defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(orelse=[]):  # the tests are not the main module
            return ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return not (statement.decorator_list or statement.args.defaults or any(statement.args.kw_defaults))
        case ast.ClassDef():
            return not statement.decorator_list and all(map(_only_defines, statement.body))
        case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Assign(value=ast.Constant()):
            return True
    return False


def _bound_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias():
            yield (node.asname or node.name).partition(".")[0]
        case ast.ExceptHandler(name=str(name)):
            yield name


def _parsed(source: str, what: str) -> ast.Module:
    try:
        return parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not Python code: {error}") from None


def _text(case: dict[str, Any], field: str, default: str | None = None) -> str:
    value = case.get(field, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise ValueError(f"{field} takes a text, got {str(value)[:40]!r}")
    return value.replace("\r\n", "\n")


def _texts(case: dict[str, Any], field: str) -> tuple[str, ...]:
    values = case[field]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{field} takes a list of one or more texts, got {str(values)[:40]!r}")
    return tuple(value.replace("\r\n", "\n") for value in values)


def _pairs(case: dict[str, Any], kind: type) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    inputs, outputs = case["inputs"], case["outputs"]
    for field, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, list) or not values:
            raise ValueError(f"{field} takes a list with a value per test, got {str(values)[:40]!r}")
        checked = field == "inputs" or kind is str
        if checked and (wrong := [value for value in values if not isinstance(value, kind)]):
            raise ValueError(f"{field} takes a list of {kind.__name__}, got {str(wrong[0])[:40]!r} in it")
    if len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs differ in length: {len(inputs)} and {len(outputs)}")
    return tuple(inputs), tuple(outputs)
