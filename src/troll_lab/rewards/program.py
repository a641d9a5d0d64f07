"""The program in a completion: its fenced block, with the definitions that it needs from the other blocks.

Blocks are read line by line and not parsed, since a parser outside the sandbox could be attacked.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator, Sequence

from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests, Tests

#: Longer texts are not programs: the longest solution of a contest has a tenth of these characters.
MAX_PROGRAM = 2**20

# The parentheses hold a few names, and a bound keeps the search linear.
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]{0,500}\))?[^\n]*", re.M)

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.M)
# An indented first line.
_BODY = re.compile(r"(?:[ \t]*\n)*+(?:\t|  )[ \t]*+\S")

#: The first word after a fence, as in `python title="a.py"`, `py3` or `{.python}`, but not in `python-repl`.
_PYTHON = re.compile(r"\{?[ \t]*\.?(?:i?python|py|pypy)[\d.]*(?![\w+#-])", re.I)
_READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0|\bfileinput\b")
_PRINTS = re.compile(r"\bprint\(|\bstdout\b|\bos\.write\(")

_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.M)
_IMPORTED = re.compile(r"(?:from[ \t]+(?!__future__)[\w.]+[ \t]+)?import\b(.*)", re.S)
_IMPORTED_NAME = re.compile(r"(\w+)(?:\.\w+)*(?:[ \t]+as[ \t]+(\w+))?")
_ASSIGNED = re.compile(r"(\w+(?:[ \t]*,[ \t]*\w+)*)[ \t]*(?::[^=\n]*)?=(?!=)(.*)", re.S)
_BOUND = re.compile(r"\b(\w+)[ \t]*=(?!=)|\b(?:for|def|class|as|import)[ \t]+(\w+)")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_ASIDE = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|#.*")

#: Names in the values of constants and functions. A value with other names may read, print or fail.
_MAKERS = {
    "Counter", "OrderedDict", "TypeVar", "cache", "collections", "defaultdict", "deque", "dict", "float", "frozenset",
    "functools", "int", "list", "lru_cache", "math", "namedtuple", "partial", "range", "set", "sys", "tuple",
    "False", "None", "True",
}  # fmt: skip


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


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields the text after the opening fence of each block, and its content, in one pass over the lines."""
    fence, info, block, indent = "", "", list[str](), 0
    for line in text.split("\n"):
        stripped = line.strip(" \t")
        rest = stripped.lstrip(stripped[:1])
        marks = stripped[: len(stripped) - len(rest)]
        margin = len(line) - len(line.lstrip(" \t"))
        # A fence that is indented by more than 3 is part of a string in the program.
        if fence and marks.startswith(fence) and not rest and margin <= indent + 3:
            yield info, "\n".join(block) + "\n"
            fence = ""
        elif fence:
            block.append(line[indent:] if not line[:indent].strip() else line)
        elif marks.startswith(("```", "~~~")) and "`" not in rest:
            fence, info, block, indent = marks, rest.strip(), [], margin
    if fence:
        yield info, "\n".join(block) + "\n"


def defines(program: str, names: Iterable[str]) -> bool:
    """Whether a program defines one of some names: by `def` or `class`, or at its margin by an assignment."""
    definition = r"^(?:[ \t]*(?:(?:async +)?def|class)[ \t]+{0}\b|{0}[ \t]*(?::[^=\n]*)?=(?!=))"
    return any(re.search(definition.format(re.escape(name)), program, re.M) for name in names)


def program_among(fenced: Iterable[tuple[str, str]], names: Sequence[str], whole: bool) -> tuple[str, str] | None:
    """Chooses the block that is the program.

    Args:
        fenced: The blocks, from `fenced_blocks`.
        names: The names of the program that the tests use.
        whole: Whether the program runs as a whole, from its input to its output.

    Returns:
        The imports and definitions in other blocks that the program needs, and the program; None if no block is one.
    """
    shown = [(info, block) for info, block in fenced if block.strip() and not block.lstrip().startswith(">>>")]
    marked = [block for info, block in shown if _PYTHON.match(info)]
    unmarked = [block for info, block in shown if not info]
    latest_first = [*reversed(marked), *reversed(unmarked)]
    if not latest_first:
        return None
    program = next((block for block in latest_first if defines(block, names)), None) or _likely(
        marked or unmarked, whole
    )
    others = [block for info, block in shown if block is not program and (not info or _PYTHON.match(info))]
    return _needed(program, others, names), program


def _likely(blocks: Sequence[str], whole: bool) -> str:
    """The longest block; for a whole program, the last that reads input, of those that act and print, if any."""
    if whole:
        for runs in (lambda block: any(map(_acts, _items(block))), _READS.search, _PRINTS.search):
            blocks = [block for block in blocks if runs(block)] or blocks
        if _READS.search(blocks[-1]):
            return blocks[-1]
    return max(reversed(blocks), key=len)


def _needed(program: str, others: Iterable[str], names: Iterable[str]) -> str:
    """The imports and definitions in other blocks that a program needs, the last of each name.

    Nothing else is taken from them: their examples, checks and reads must not run. Names that Python defines are not
    needed: a program that calls `input` is complete.
    """
    items = [item for block in others for item in _items(block) if not _acts(item)]
    places = {name: place for place, item in enumerate(items) for name in _names_of(item)}
    found = {name for item in _items(program) for name in _names_of(item)} | set(dir(builtins))
    found.update(*_BOUND.findall(program))
    waiting, taken = [*names, *_NAME.findall(program)], set[int]()
    while waiting:
        name = waiting.pop()
        if name in places and name not in found:
            found.add(name)
            taken.add(places[name])
            waiting += _NAME.findall(items[places[name]])
    return "\n".join(items[place] for place in sorted(taken))


def _items(block: str) -> Iterator[str]:
    """The statements at the margin of a block, each with its decorators and the lines that continue it."""
    item, decorates, in_text = list[str](), False, False
    for line in block.split("\n"):
        if line[:1] not in ("", " ", "\t", ")", "]", "}", "#") and not in_text:
            if item and not decorates:
                yield "\n".join(item)
                item = []
            decorates = line[0] == "@"
        item.append(line)
        in_text ^= (line.count('"""') + line.count("'''")) % 2 == 1
    yield "\n".join(item)


def _names_of(item: str) -> list[str]:
    """The names that a statement defines, imports or assigns to."""
    if item.startswith(("@", "def ", "class ", "async ")):
        return _DEFINED.findall(item)
    if imported := _IMPORTED.match(item):
        return [last or first for first, last in _IMPORTED_NAME.findall(_ASIDE.sub("", imported[1]))]
    assigned = _ASSIGNED.match(item)
    return re.split(r"[ \t]*,[ \t]*", assigned[1]) if assigned else []


def _acts(item: str) -> bool:
    """Whether a statement does more than prepare, define, import, or name a function or a constant."""
    if assigned := _ASSIGNED.match(item):
        return not _MAKERS.issuperset(_NAME.findall(_ASIDE.sub("", assigned[2]).partition("lambda")[0]))
    prepares = ("sys.setrecursionlimit(", "threading.stack_size(", "from ", "import ", '"""', "'''", "#")
    return bool(item.strip()) and not item.startswith(prepares) and not _names_of(item)
