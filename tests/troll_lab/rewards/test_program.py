import json
import time

import pytest

from tests.troll_lab.rewards import datasets
from troll_lab.rewards.program import MAX_PROGRAM, defines, fenced_blocks, program_among, read_program
from troll_lab.rewards.tests import parse_tests

TESTS = parse_tests(json.dumps({"asserts": ["assert f(1) == 2"]}))
STREAM = parse_tests(json.dumps({"inputs": [""], "outputs": [""]}))
F = "def f(x):\n    return x + 1\n"


PREFIX = 'import math\n\ndef f(x):\n    """Adds one."""\n'
FUTURE = "from __future__ import annotations"
SPLIT = '"Text."\nfrom __future__ import (\n  annotations,\n)'


@pytest.mark.parametrize(
    ("prefix", "completion", "program"),
    [
        ("", F, F),
        ("", f"```python\n{F}```", F),
        ("", f"Sure!\n\n```py\n{F}```\n\nThis adds one.", F),
        ("", f"````python\n{F}```\n````", F + "```\n"),
        ("", f"```python\n{F}", F + "\n"),
        ("", f"```python\ndef f(x): pass\n```\nBetter:\n```python\n{F}```", F),
        ("", "```python\nx = 1\n```\n```python\ny = 2\n```", "y = 2\n"),
        ("", "1. Code:\n   ```python\n   def f(x):\n       return x + 1\n   ```", F),
        ("", "```python\n    def f(x):\n        return x + 1\n```", F),
        ("", F.replace("\n", "\r\n"), F),
        ("", f"```python\n{F}```\n".replace("\n", "\r\n"), F),
        ("", "  s = '''\n\n   \n  '''\n  t = 1", "s = '''\n\n   \n'''\nt = 1"),
        ("", f"<think>\n```python\ndef f(x): pass\n```\n</think>\n```python\n{F}```", F),
        ("", "", None),
        ("", " \n\t\n", None),
        ("", "```python\n```", None),
        ("", "```json\n{}\n```", None),
        ("", f"{F}```\n\nThis adds one.", F),  # the fence was opened by the prompt
        ("", f"{F}```\nprint(f(1))\n```\n", F),
        ("", "x" * MAX_PROGRAM, "x" * MAX_PROGRAM),
        ("", "x" * (MAX_PROGRAM + 1), None),
        (PREFIX, "    return x + 1", PREFIX + "    return x + 1"),
        (PREFIX, "    y = x\n\n    return y\n\nprint(f(1))\ndef g(): pass", PREFIX + "    y = x\n\n    return y\n"),
        (PREFIX, "```python\n    return x + 1\n```", PREFIX + "    return x + 1\n"),
        (PREFIX, "    return x + 1\n```\n\nThis adds one.", PREFIX + "    return x + 1\n"),
        (PREFIX, "    return x + 1\n```\nUse:\n```python\nprint(f(1))\n```", PREFIX + "    return x + 1\n"),
        (PREFIX, "\n    return x + 1\n\ndef f(x):\n    pass", PREFIX + "\n    return x + 1\n"),
        (PREFIX, f"Like this:\n```python\n{F}```", f"import math\n\n{F}"),
        (PREFIX, f"  1. Add one.\n  2. Return.\n\n```python\n{F}```", f"import math\n\n{F}"),
        (PREFIX, f"```python\n{F}```", f"import math\n\n{F}"),
        (PREFIX, F, f"import math\n\n{F}"),
        (PREFIX, PREFIX + "    return x + 1", PREFIX + "    return x + 1"),
        (PREFIX, "", None),
        ("def f(x):\n", F, F),
        ("class A:\n    def f(self): pass\n\n\ndef f(x):\n", F, f"class A:\n    def f(self): pass\n\n{F}"),
        ("import a\n\n@a.b\n@a.c\ndef f(x):\n", F, f"import a\n\n{F}"),
        ("import a\r\ndef f(x):\r\n", F, f"import a\n\n{F}"),
        ("import a\ndef f(x):\n", f"{FUTURE}\n{F}", f"{FUTURE}\n\nimport a\n\n{F}"),
        ("import a\ndef f(x):\n", f"{SPLIT}\nimport b\n\n{F}", f"{SPLIT}\n\nimport a\n\nimport b\n\n{F}"),
        ("import a\ndef f(x):\n", f"{FUTURE}  # (PEP 563)\n{F}", f"{FUTURE}  # (PEP 563)\n\nimport a\n\n{F}"),
        ("import a\n", F, F),  # no signature, so nothing says where the head would end
    ],
)
def test_read_program_finds_program_and_its_prefix(prefix, completion, program):
    assert read_program(completion, TESTS, prefix) == program


def test_read_program_keeps_helpers_that_the_tests_use():
    tests = datasets.code_tests(json.dumps({"check": "def check(c): assert h(c(1)) == 2", "entry_point": "f"}))
    assert tests.inferred == ("h",)
    helper = "import a\n\ndef h(x): return x"
    assert read_program(F, tests, f"{helper}\n\ndef f(x):\n") == f"{helper}\n\n{F}"
    both = f"def h(x): return x + 1\n\n{F}"
    assert read_program(both, tests, f"{helper}\n\ndef f(x):\n") == f"import a\n\n{both}"


def test_read_program_adds_other_blocks_and_head_of_prefix():
    future = "from __future__ import annotations\n"
    completion = f"```python\nONE = 1\nprint(ONE)\n```\n```python\n{future}def f(x): return x + ONE\n```"
    found = read_program(completion, TESTS, PREFIX)
    assert found == f"{future.strip()}\n\nimport math\n\nONE = 1\n\ndef f(x): return x + ONE\n"


@pytest.mark.parametrize(
    "text",
    ["```" * 300000, "```\n" * 250000, "`" * 10**6, "\n" * 10**6, " " * 10**6, "def " * 250000, "</think>" * 130000,
     " \t" * 500000 + "x", "```python\n" * 100000, "    \n" * 200000, "\r" * 10**6,
     "from __future__ import (\n" * 40000 + F, "from __future__ import " * 40000 + F, "~~~\n" * 250000, "a=b;" * 250000,
     "x = y\n" * 160000, "@a\n" * 300000, '"""\n' * 250000, "import a." * 110000, "for a in b: " * 80000, "'" * 10**6,
     "from a import (b as c, " * 40000, "a, " * 300000, "x = (" * 200000, "def a(): b()\n" * 70000, ">>> a\n" * 160000],
)  # fmt: skip
def test_read_program_takes_linear_time(text):
    text = text[:80_000]
    start = time.process_time()
    for each in (text, f"```py\n{text[: MAX_PROGRAM - 50]}\n```\n```py\nprint(x)\n```"):
        read_program(each, TESTS)
        read_program(each, TESTS, PREFIX)
        read_program(each, STREAM)
    assert time.process_time() - start < 1  # a fifth of a second at most, on a quiet machine


READS = "n = int(input())\nprint(n)\n"


def fenced(*blocks: str, info: str = "python") -> str:
    return "\nSome words.\n".join(f"```{info}\n{block}```\n" for block in blocks)


def program_in(text: str, names: tuple[str, ...] = ("f",), whole: bool = False) -> str | None:
    found = program_among(fenced_blocks(text), names, whole)
    return None if found is None else found[0] + found[1]


@pytest.mark.parametrize(
    "info",
    ["python", "Python", " python3", "py", "py3", "python3.11", 'python title="a.py"', "python:main.py",
     "python,linenos", "{.python .numberLines}", "{python}", "python {1,3}", "python 3", "ipython", "pypy3"],
)  # fmt: skip
@pytest.mark.parametrize("fence", ["```", "~~~", "`````"])
def test_first_word_after_the_fence_is_the_language(info: str, fence: str) -> None:
    text = f"{fence}{info}\n{F}{fence}\n\nOutput:\n{fence}\ndef f(x): pass\n{fence}\n"
    assert program_in(text) == F


@pytest.mark.parametrize(
    "info", ["bash", "json", "text", "output", "cpp", "c", "pycon", "python-repl", "pytb", "console"]
)
def test_blocks_in_another_language_are_no_program(info: str) -> None:
    assert program_in(f"```{info}\n{F}```\n") is None
    assert program_in(f"```{info}\n{F}```\n", whole=True, names=()) is None
    assert program_in(f"```python\nx = 1\n```\n```{info}\n{F}```\n") == "x = 1\n"


IN_A_TEXT = 'def f(x):\n    """Adds.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x + 1\n'
DRAFT = "def f(x):\n    return helper(x)\n\nprint(f(1))\nassert f(1) == 3\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"```python\n{F}```\nOutput:\n```\n2\nand much more text than there was before it\n```", F),
        (f"```\n2\nand much more text than there was before it\n```\n```python\n{F}```", F),
        (f"```python\n{F}```\nExample:\n```python\n>>> f(1)\n2\n>>> def f(x): pass\n```", F),
        (f"```\n{F}```\nExample:\n```python\nprint(f(1), f(2), f(3), f(4), f(5), f(6), f(7))\n```", F),
        (f"```f(1)``` is tested.\n```python\n{F}```", F),
        (f"~~~python\n{F}~~~\n~~~\n```\n~~~", F),
        (f"```python\n{IN_A_TEXT}```\nThat is all.", IN_A_TEXT),
        (f"~~~~python\n{F}~~~\n```\n~~~~", f"{F}~~~\n```\n"),
        (fenced(DRAFT, F, "print(f(1))\nassert f(1) == 2\n"), F),
    ],
)
def test_program_among_prefers_marked_and_tested_blocks(text: str, program: str) -> None:
    assert program_in(text) == program


@pytest.mark.parametrize(
    "program",
    ["f = lambda x: x + 1\n", "f: Callable[[int], int] = lambda x: x + 1\n", "f = functools.partial(int.__add__, 1)\n",
     "async def f(x): return x\n", "class f: pass\n", "class Solution:\n    def f(self, x): return x\n",
     "f=(1).__add__\n"],
)  # fmt: skip
def test_defines_finds_definitions_and_assignments(program: str) -> None:
    assert defines(program, ["f"]) and defines(program, ["g", "f"])
    assert program_in(fenced(program, f"print({', '.join(['f(1)'] * 10)})\n")) == program


@pytest.mark.parametrize(
    "program",
    ["f == 1\n", "ff = 1\n", "x.f = 1\n", "    f = 1\n", "f(x=1)\n", "def ff(): pass\n", "# f = 1\n", "f: int\n"],
)
def test_defines_ignores_other_uses_of_a_name(program: str) -> None:
    assert not defines(program, ["f"])


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [
        ((READS, "print(1)\nprint(2)\nprint(3)\nprint(4)\n"), 0),
        (("print(solve(3))\n", READS), 1),
        ((READS, "a, b = map(int, input().split())\n"), 0),  # another way to read, but no program
        (("import sys\nfor line in sys.stdin:\n    print(line)\n", "print('a')\n"), 0),
        (("for i in range(3):\n    print(i)\n", "print(0)\n"), 0),
        (("def unused(): pass\ndef unused_as_well(): pass\n", "print(0)\n"), 1),
        (("x = 1\n", "y = 2\n"), 1),
        (("total = 1 + 2\n", "y = 2\n"), 0),
        (("n = int(input())\nprint(n + 1)\n", READS, "print(7)\n"), 1),  # the first is a draft
    ],
)
def test_program_among_finds_a_whole_program(blocks: tuple[str, ...], chosen: int) -> None:
    assert program_in(fenced(*blocks), (), whole=True) == blocks[chosen]


def ran(program: str | None) -> dict[str, object]:
    """The names of a program that has run; it finds no input and prints to nobody."""
    assert program is not None
    seen: list[object] = []
    space: dict[str, object] = {"input": None, "print": seen.append}
    exec(compile(program, "program", "exec"), space)
    assert not seen
    return space


EARLIER = '''
"""A module."""
from __future__ import annotations
import math, os.path as path
from collections import (
    deque as queue,  # and not a floor
    Counter,
)

MOD = 10**9 + 7  # the modulus
LETTERS, EMPTY = "input()", []
memo: dict[int, int] = {}
twice = lambda x: print(x) or 2 * x
start = int(input())  # fails
half = start // 2

# A helper.
@twice_again(
    1
)
def unused(): pass

def wraps(function):
    """Decorates.

Not indented, as texts may be.
def inner(): pass
"""
    return function

@wraps
# with a comment
def helper(x):
# at the margin
    return floor(x) + Helper.one

class Helper:
    one = 1

def floor(x): return math.floor(x)

print(helper(2))
assert helper(1) == 5
if __name__ == "__main__":
    print(helper(input()))
'''


def test_program_among_adds_needed_definitions() -> None:
    later = "def f(x):\n    return helper(x) % MOD, queue([x]), LETTERS\n"
    space = ran(program_in(fenced(EARLIER, later, "print(f(1))\n")))
    assert space["f"](1.5)[0] == 2  # type: ignore[operator]
    assert {"helper", "wraps", "Helper", "floor", "math", "queue", "MOD", "LETTERS"} <= space.keys()
    assert not {"start", "half", "unused", "memo"} & space.keys()
    # A draft of a helper gives way, and so does whatever the program has itself.
    drafts = fenced("def helper(x): return 0\n", "def helper(x): return 1\n", "def f(x): return helper(x)\n")
    assert ran(program_in(drafts))["f"](5) == 1  # type: ignore[operator]


def test_program_among_joins_blocks_with_tested_names() -> None:
    text = fenced("class A:\n    x = 1\n", "def g(): return 1\n", "def f(): return 0\n")
    assert {"A", "f", "g"} <= ran(program_in(text, ("A", "f", "g"))).keys()


def test_program_among_adds_definitions_to_a_bare_call() -> None:
    main = "import sys\ndef main():\n    n = int(input())\n    print(n)\n\nsys.setrecursionlimit(9999)\n"
    found = program_in(fenced(main, "if __name__ == '__main__':\n    main()\n"), (), whole=True)
    assert found is not None and found.startswith("def main") and found.endswith("    main()\n")


@pytest.mark.parametrize(
    "program",
    [
        "def f(n):\n    half = n // 2\n    input = sum = None\n    return half\n",
        "def f(n):\n    def helper(x): return x\n    return helper(n)\n",
        "f = helper = abs\n",
        "import helper\ndef f(n): return helper\n",
        "def f(n):\n    for helper in n: pass\n",
        "def f(n): return input(n), n.helper, n.MOD\n",
    ],
)
def test_program_among_adds_nothing_that_is_not_needed(program: str) -> None:
    spoiled = "import nowhere\ninput = None\ndef helper(x: Missing): pass\nhalf = n // 2\nsum = {}\nMOD = 7\n"
    assert program_in(fenced(spoiled, program)) == program
