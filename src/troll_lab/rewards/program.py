"""The input of a code reward: the program in a completion, and the tests of a task."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, get_args

from troll_lab.rewards.blocks import defines, fenced_blocks, program_among
from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests, Tests
from troll_sandbox.output import Compare
from troll_sandbox.unbounded import parse, read_json

#: Longer texts are not programs: the longest solution of a contest has a tenth of these characters.
MAX_PROGRAM = 2**20

# The parentheses hold a few names, and a bound keeps the search linear.
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]{0,500}\))?[^\n]*", re.M)

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.M)
# An indented first line.
_BODY = re.compile(r"(?:[ \t]*\n)*+(?:\t|  )[ \t]*+\S")

_FIELDS = (
    ({"asserts"}, {"setup", "names", "plain"}),
    ({"check", "entry_point"}, {"setup", "plain"}),
    ({"function", "inputs", "outputs"}, set[str]()),
    ({"inputs", "outputs"}, {"compare"}),
)


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


def read_program(completion: str, tests: Tests, prefix: str = "") -> str | None:
    """Reads the program from a completion.

    The program is a fenced block that is marked as Python, or not marked if no block is: the last that defines a name
    that the tests use; else, for tests by standard input, the last that reads input; else the longest. Imports and
    definitions in other blocks that it needs are put in front. A block that is not closed ends with the text. A text
    without blocks is itself the program, and so is the text before the first fence if only that text defines such a
    name. Everything up to the last `</think>` is ignored.

    If there is a prefix and the program defines none of the names that the tests use, it continues the prefix, up to
    the first line that is not indented. If no block defines one, a text that starts with an indented line does so too,
    without what follows that part. If the program defines some of the names, it may use the imports and helpers before
    the first such definition in the prefix.

    Args:
        completion: The text of the completion, as the model wrote it.
        tests: The tests of the task.
        prefix: The code at the end of the prompt.

    Returns:
        The program, with line feeds for line ends; None if there is none, or if the text after thinking and the prefix
        have more than `MAX_PROGRAM` characters together.
    """
    text = completion.rpartition("</think>")[2].replace("\r\n", "\n").replace("\r", "\n")
    if len(text) + len(prefix) > MAX_PROGRAM:
        return None
    names, prefix = _names(tests), prefix.replace("\r\n", "\n")
    fenced = list(fenced_blocks(text))
    found = program_among(fenced, names, whole=isinstance(tests, StreamTests)) if fenced else ("", text)
    if not (fenced and found and defines(found[1], names)):
        before = _FENCE.split(text, maxsplit=1)[0]
        if prefix and _BODY.match(before) and len(body := _indented_part(before)) < len(text):
            return prefix + body
        if defines(before, names):
            found = ("", before)
    if found is None or not found[1].strip():
        return None
    needed, program = found
    own = [name for name in names if defines(program, [name])]
    if prefix and not own:
        return prefix + _indented_part(program)
    return _after(_head(prefix, own), _after(needed, _dedented(program)))


def _names(tests: Tests) -> tuple[str, ...]:
    if isinstance(tests, CodeTests):
        return tests.names + tests.inferred
    return (tests.function,) if isinstance(tests, FunctionTests) else ()


def _head(prefix: str, names: Iterable[str]) -> str:
    """The part of a prefix before the first definition, with its decorators, of a name that the program defines."""
    lines = prefix.split("\n")
    for index, line in enumerate(lines):
        if not line[:1].isspace() and defines(line, names):
            while index and lines[index - 1].startswith("@"):
                index -= 1
            return "\n".join(lines[:index]).strip("\n")
    return ""


def _after(head: str, program: str) -> str:
    """Puts a head before a program; imports from the future stay in front, as Python demands."""
    if not head or program.startswith(head):
        return program
    future = [match.end() for match in _FUTURE.finditer(program)]
    start = future[-1] if future else 0
    return "\n\n".join(part for part in (program[:start].rstrip("\n"), head, program[start:].lstrip("\n")) if part)


def _indented_part(text: str) -> str:
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if line and not line[0].isspace():
            return "\n".join(lines[: index or None])
    return text


def _dedented(text: str) -> str:
    # Unlike textwrap's, it does not change lines of white space, which may be part of a text.
    lines = text.split("\n")
    margin = min(len(line) - len(line.lstrip(" \t")) for line in lines if line.strip())
    return "\n".join(line[margin:] if line.strip() else line for line in lines) if margin else text


def _code_tests(tests: tuple[str, ...], case: dict[str, Any], names: tuple[str, ...]) -> CodeTests:
    setup, plain = _text(case, "setup", ""), case.get("plain", False)
    if not isinstance(plain, bool):
        raise ValueError(f"plain takes true or false, got {str(plain)[:40]!r}")
    trees = [_parsed(setup, "setup"), *(_parsed(test, f"test {index}") for index, test in enumerate(tests))]
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
