"""One dialect for docstrings: Google style in Markdown, with entries that say more than their names."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
FILES = {
    path.relative_to(ROOT): path.read_text()
    for folder in ("src", "benchmarks", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

#: Sphinx's literals and roles, which Markdown shows unchanged.
SPHINX = re.compile(r"(?<!`)``(?!`)|:(?:attr|class|data|exc|func|meth|mod|obj|ref):`")

#: Words that do not say what a thing is.
EMPTY = set(re.split(" ", "a above as at for from here in is it its likewise of see the their this parent's trainer's"))


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, also of fields."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def empty_entries(docstring: str) -> Iterator[str]:
    """The arguments and attributes whose descriptions only repeat their names."""
    sections = griffe.Docstring(docstring).parse("google", warnings=False) if ":\n    " in docstring else []
    for section in sections:
        if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            for entry in section.value:
                words = re.findall(r"[^\W_][\w'’]*", entry.description.lower())
                if not set(words) - EMPTY - set(entry.name.lower().split("_")):
                    yield f"{entry.name}: {entry.description}"


def test_docstrings_and_comments_are_markdown() -> None:
    assert not [
        f"{path}:{line}: {text}"
        for path, source in FILES.items()
        for line, text in (*docstrings(source), *comments(source))
        if SPHINX.search(text)
    ]


def test_entries_say_more_than_their_names() -> None:
    assert not [
        f"{path}:{line}: {entry}"
        for path, source in FILES.items()
        if path.parts[0] in ("src", "benchmarks")
        for line, text in docstrings(source)
        for entry in empty_entries(text)
    ]


def test_what_is_refused() -> None:
    assert SPHINX.search("``x``") and SPHINX.search("see :func:`f`")
    assert not SPHINX.search("```python\n`x`\n```")
    text = "Does it.\n\nArgs:\n    rank: Its rank.\n    args: The\n        trainer's.\n    size: The bytes."
    assert list(empty_entries(text)) == ["rank: Its rank.", "args: The\ntrainer's."]
