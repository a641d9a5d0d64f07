import json
import time

import pytest

from tests.troll_lab.rewards import datasets
from troll_lab.rewards.program import MAX_PROGRAM, CodeTests, FunctionTests, StreamTests, parse_tests, read_program

TESTS = parse_tests(json.dumps({"asserts": ["assert f(1) == 2"]}))
STREAM = parse_tests(json.dumps({"inputs": [""], "outputs": [""]}))
F = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (F, F),
        (f"```python\n{F}```", F),
        (f"Sure!\n\n```py\n{F}```\n\nThis adds one.", F),
        (f"````python\n{F}```\n````", F + "```\n"),
        (f"```python\n{F}", F + "\n"),
        (f"```python\ndef f(x): pass\n```\nBetter:\n```python\n{F}```", F),
        ("```python\nx = 1\n```\n```python\ny = 2\n```", "y = 2\n"),
        ("1. Code:\n   ```python\n   def f(x):\n       return x + 1\n   ```", F),
        ("```python\n    def f(x):\n        return x + 1\n```", F),
        (F.replace("\n", "\r\n"), F),
        (f"```python\n{F}```\n".replace("\n", "\r\n"), F),
        ("  s = '''\n\n   \n  '''\n  t = 1", "s = '''\n\n   \n'''\nt = 1"),
        (f"<think>\n```python\ndef f(x): pass\n```\n</think>\n```python\n{F}```", F),
        ("", None),
        (" \n\t\n", None),
        ("```python\n```", None),
        ("```json\n{}\n```", None),
        (f"{F}```\n\nThis adds one.", F),  # the fence was opened by the prompt
        (f"{F}```\nprint(f(1))\n```\n", F),
        ("x" * MAX_PROGRAM, "x" * MAX_PROGRAM),
        ("x" * (MAX_PROGRAM + 1), None),
    ],
)
def test_the_program_in_a_completion(completion, program):
    assert read_program(completion, TESTS) == program


PREFIX = 'import math\n\ndef f(x):\n    """Adds one."""\n'


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("    return x + 1", PREFIX + "    return x + 1"),
        ("    y = x\n\n    return y\n\nprint(f(1))\ndef g(): pass", PREFIX + "    y = x\n\n    return y\n"),
        ("```python\n    return x + 1\n```", PREFIX + "    return x + 1\n"),
        ("    return x + 1\n```\n\nThis adds one.", PREFIX + "    return x + 1\n"),
        ("    return x + 1\n```\nUse:\n```python\nprint(f(1))\n```", PREFIX + "    return x + 1\n"),
        ("\n    return x + 1\n\ndef f(x):\n    pass", PREFIX + "\n    return x + 1\n"),
        (f"Like this:\n```python\n{F}```", f"import math\n\n{F}"),
        (f"  1. Add one.\n  2. Return.\n\n```python\n{F}```", f"import math\n\n{F}"),
        (f"```python\n{F}```", f"import math\n\n{F}"),
        (F, f"import math\n\n{F}"),
        (PREFIX + "    return x + 1", PREFIX + "    return x + 1"),
        ("", None),
    ],
)
def test_a_completion_may_continue_a_prefix(completion, program):
    assert read_program(completion, TESTS, PREFIX) == program


@pytest.mark.parametrize(
    ("prefix", "completion", "program"),
    [
        ("def f(x):\n", F, F),
        ("class A:\n    def f(self): pass\n\n\ndef f(x):\n", F, f"class A:\n    def f(self): pass\n\n{F}"),
        ("import a\n\n@a.b\n@a.c\ndef f(x):\n", F, f"import a\n\n{F}"),
        ("import a\r\ndef f(x):\r\n", F, f"import a\n\n{F}"),
        ("import a\ndef f(x):\n", f"from __future__ import annotations\n{F}", None),
        ("import a\ndef f(x):\n", f'"Text."\nfrom __future__ import (\n  annotations,\n)\nimport b\n\n{F}', None),
        ("import a\ndef f(x):\n", f"from __future__ import annotations  # late (PEP 563)\n{F}", None),
        ("import a\n", F, F),  # no signature, so nothing says where the head would end
    ],
)
def test_read_program_keeps_imports_and_helpers_of_the_prefix(prefix, completion, program):
    found = read_program(completion, TESTS, prefix)
    assert found is not None
    compile(found, "program", "exec")
    if program is None:  # the future stays in front
        assert found.index("__future__") < found.index("import a\n") < found.index("def f")
        assert sorted(found.split()) == sorted(f"{completion} import a".split())
    else:
        assert found == program


def test_read_program_keeps_a_helper_of_the_prefix_that_the_tests_use():
    tests = datasets.code_tests(json.dumps({"check": "def check(c): assert h(c(1)) == 2", "entry_point": "f"}))
    assert tests.inferred == ("h",)
    helper = "import a\n\ndef h(x): return x"
    assert read_program(F, tests, f"{helper}\n\ndef f(x):\n") == f"{helper}\n\n{F}"
    both = f"def h(x): return x + 1\n\n{F}"
    assert read_program(both, tests, f"{helper}\n\ndef f(x):\n") == f"import a\n\n{both}"


def test_a_program_has_the_definitions_of_other_blocks_and_the_head_of_the_prefix():
    future = "from __future__ import annotations\n"
    completion = f"```python\nONE = 1\nprint(ONE)\n```\n```python\n{future}def f(x): return x + ONE\n```"
    found = read_program(completion, TESTS, PREFIX)
    assert found == f"{future.strip()}\n\nimport math\n\nONE = 1\n\ndef f(x): return x + ONE\n"


def test_parse_tests_keeps_all_values_of_json():
    digits, deep = "7" * 5000, "[" * 5000 + "]" * 5000
    text = f'{{"function": "f", "inputs": [[{digits}, NaN, {deep}]], "outputs": [-{digits}]}}'
    tests = parse_tests(text)
    assert isinstance(tests, FunctionTests) and tests.outputs[0] % 10 == 3
    assert len(datasets.code_tests(json.dumps({"asserts": [f"assert f() == {digits}"]})).tests) == 1
    with pytest.raises(ValueError, match="nested deeper than"):
        parse_tests("[" * 100_000)


@pytest.mark.parametrize(
    "text",
    ["```" * 300000, "```\n" * 250000, "`" * 10**6, "\n" * 10**6, " " * 10**6, "def " * 250000, "</think>" * 130000,
     " \t" * 500000 + "x", "```python\n" * 100000, "    \n" * 200000, "\r" * 10**6,
     "from __future__ import (\n" * 40000 + F, "from __future__ import " * 40000 + F, "~~~\n" * 250000, "a=b;" * 250000,
     "x = y\n" * 160000, "@a\n" * 300000, '"""\n' * 250000, "import a." * 110000, "for a in b: " * 80000, "'" * 10**6,
     "from a import (b as c, " * 40000, "a, " * 300000, "x = (" * 200000, "def a(): b()\n" * 70000, ">>> a\n" * 160000],
)  # fmt: skip
def test_reading_takes_linear_time(text):
    text = text[:200_000]
    start = time.process_time()
    for each in (text, f"```py\n{text[: MAX_PROGRAM - 50]}\n```\n```py\nprint(x)\n```"):
        read_program(each, TESTS)
        read_program(each, TESTS, PREFIX)
        read_program(each, STREAM)
    assert time.process_time() - start < 1.5


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        (
            '{"asserts": ["assert f(1) == g(2)\\r\\n"], "setup": "import re", "names": ["sum"]}',
            CodeTests(("assert f(1) == g(2)\n",), "import re", ("sum",), ("f", "g"), ()),
        ),
        (
            '{"check": "def check(c):\\n    assert c(1)\\n", "entry_point": "f", "setup": "y = 1"}',
            CodeTests(("def check(c):\n    assert c(1)\n\ncheck(f)\n",), "y = 1", ("f",), (), ()),
        ),
        (
            '{"function": "f", "inputs": [[1], [2, {"a": null}]], "outputs": [1, [2]]}',
            FunctionTests("f", ([1], [2, {"a": None}]), (1, [2])),
        ),
        ('{"inputs": ["1\\n"], "outputs": ["2"]}', StreamTests(("1\n",), ("2",))),
        ('{"inputs": ["1\\n"], "outputs": ["2"], "compare": "numbers"}', StreamTests(("1\n",), ("2",), "numbers")),
        ('{"asserts": ["assert f()"], "plain": true}', CodeTests(("assert f()",), "", (), ("f",), (), plain=True)),
    ],
)
def test_parse_tests_reads_each_form(text, tests):
    assert parse_tests(text) == tests


@pytest.mark.parametrize(
    ("source", "inferred", "modules"),
    [
        ("assert f(x := 2) == x", {"f"}, set()),
        ("assert math.isclose(f(1), math.pi)", {"f"}, {"math"}),
        ("import math\nassert math.isclose(f(1), math.pi)", {"f"}, set()),
        ("from math import pi as p\nassert f(p) == p", {"f"}, set()),
        ("assert copy([1]) == [1]", {"copy"}, set()),
        ("assert sum(f(i) for i in range(3)) == len([k for k, v in {}.items()])", {"f"}, set()),
        ("def helper(a, *b, c=1, **d): return f(a, b, c, d)\nassert helper(1)", {"f"}, set()),
        ("assert sorted(f(), key=lambda p: p[0])", {"f"}, set()),
        ("try:\n    f()\nexcept Mine as error:\n    print(error)", {"f", "Mine"}, set()),
        ("class A: pass\nx = A()\nx.y = f(x)\nfor i, (j, k) in f(): i, j, k", {"f"}, set()),
        ("assert f.cache is None", {"f"}, set()),
    ],
)
def test_names_that_tests_take_from_the_program(source, inferred, modules):
    tests = datasets.code_tests(json.dumps({"asserts": [source]}))
    assert (set(tests.inferred), set(tests.modules)) == (inferred, modules)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSON object as text"),
        (None, "JSON object as text"),
        ("assert f(1)", "JSON object as text"),
        ("[1]", "JSON object, got list"),
        ("{}", "must have one of"),
        ('{"asserts": ["assert f()"], "extra": 1}', "extra"),
        ('{"asserts": []}', "asserts takes a list of one or more texts"),
        ('{"asserts": "assert f()"}', "asserts takes a list"),
        ('{"asserts": ["assert f("]}', "test 0 is not Python code"),
        ('{"asserts": ["assert f()"], "setup": "("}', "setup is not Python code"),
        ('{"asserts": ["assert f()"], "setup": 3}', "setup takes a text"),
        ('{"asserts": ["assert f()"], "names": "f"}', "names takes a list"),
        ('{"check": "def check(c): pass", "entry_point": "a b"}', "entry_point takes the name"),
        ('{"check": "", "entry_point": "f"}', "check takes a text"),
        ('{"function": "f", "inputs": [1], "outputs": [1]}', "inputs takes a list of list"),
        ('{"function": "f", "inputs": [[1]], "outputs": []}', "outputs takes a list with a value per test"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "differ in length: 1 and 2"),
        ('{"inputs": [1], "outputs": ["1"]}', "inputs takes a list of str"),
        ('{"inputs": ["1"], "outputs": ["1"], "compare": "words"}', "compare takes one of tokens, numbers, got 'wo"),
        ('{"asserts": ["assert f()"], "plain": "yes"}', "plain takes true or false, got 'yes'"),
    ],
)
def test_parse_tests_names_mistakes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_tests(text)


def test_the_names_of_the_real_tasks():
    for problem in datasets.mbpp():
        tests = datasets.code_tests(problem.tests)
        assert len(tests.names + tests.inferred) == (2 if problem.name == "MBPP/367" else 1)
        assert tests.modules == ()
    for problem in datasets.humaneval():
        tests = datasets.code_tests(problem.tests)
        assert (len(tests.names), tests.inferred, tests.modules) == (1, (), ())
