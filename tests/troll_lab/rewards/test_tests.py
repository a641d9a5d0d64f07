import json

import pytest

from tests.troll_lab.rewards import datasets
from troll_lab.rewards.tests import parse_tests
from troll_sandbox.cases import CodeTests, FunctionTests, StreamTests


def test_parse_tests_keeps_all_values_of_json():
    digits, deep = "7" * 5000, "[" * 5000 + "]" * 5000
    text = f'{{"function": "f", "inputs": [[{digits}, NaN, {deep}]], "outputs": [-{digits}]}}'
    tests = parse_tests(text)
    assert isinstance(tests, FunctionTests) and tests.outputs[0] % 10 == 3
    assert len(datasets.code_tests(json.dumps({"asserts": [f"assert f() == {digits}"]})).tests) == 1
    with pytest.raises(ValueError, match="nested deeper than"):
        parse_tests("[" * 100_000)


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
def test_parse_tests_infers_names_of_the_program(source, inferred, modules):
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
        *(
            (json.dumps({"asserts": [test, "import math"]}), "the tests run nothing, so that every program would pass")
            for test in (
                *("", "# assert f() == 2", "'assert f()'", "def test_f():\n    assert f()"),
                "class T(unittest.TestCase):\n    def test_f(self): self.assertTrue(f())",
                "async def t(): assert await f()",
                "def check(c): assert c()\nif __name__ == '__main__':\n    check(f)",
            )
        ),
        ('{"asserts": ["assert f()", "def test_f(): assert f() == 2"]}', "test 1 defines test_f, and nothing runs it"),
        ('{"asserts": ["assert f()", "class TestF: pass"]}', "test 1 defines TestF, and nothing runs it"),
        *(
            (json.dumps({"asserts": [f"import unittest\n{test}"]}), "whose failures do not raise")
            for test in ("unittest.main(exit=False)", "unittest.TextTestRunner().run(suite)")
        ),
        ('{"asserts": ["assert f()"], "plain": "yes"}', "plain takes true or false, got 'yes'"),
    ],
)
def test_parse_tests_names_mistakes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_tests(text)


@pytest.mark.parametrize(
    "tests",
    [
        ["import math", "assert f()"],
        ["def helper(x): return x", "assert f()", ""],
        ["def test_f(): assert f()", "test_f()"],
        ["def test_f(): assert f()\nif __name__ != '__main__':\n    test_f()"],
        ["class T:\n    assert f()"],
        ["@run\ndef test_f(): assert f()"],
        ["import unittest\nassert unittest.TextTestRunner().run(suite).wasSuccessful()"],
        ["import unittest\nassert f()\nif __name__ == '__main__':\n    unittest.main()"],
    ],
    ids=str,
)
def test_parse_tests_takes_tests_that_run_something(tests):
    assert datasets.code_tests(json.dumps({"asserts": tests})).tests == tuple(tests)


def test_parse_tests_infers_names_of_the_real_tasks():
    for problem in datasets.mbpp():
        tests = datasets.code_tests(problem.tests)
        assert len(tests.names + tests.inferred) == (2 if problem.name == "MBPP/367" else 1)
        assert tests.modules == ()
    for problem in datasets.humaneval():
        tests = datasets.code_tests(problem.tests)
        assert (len(tests.names), tests.inferred, tests.modules) == (1, (), ())
