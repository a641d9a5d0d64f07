import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.rewards.sandbox import cheats, hostile
from troll.rewards.program import CodeTests, FunctionTests, parse_tests
from troll.rewards.sandbox.bubblewrap import Sandbox
from troll.rewards.sandbox.functions import JudgeEndedError, run_functions
from troll.rewards.sandbox.judge import Judge
from troll.rewards.sandbox.limits import Limits, Outcome

LIMITS = Limits(cpu_seconds=1.0, idle_seconds=1.0, wall_seconds=20.0)

Run = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


@pytest.fixture(scope="module")
def judge(sandbox) -> Iterator[Judge]:
    judge = Judge(sandbox)
    yield judge
    judge.close()


@pytest.fixture
def run(sandbox, judge) -> Run:
    def run(program: str, *asserts: str, limits: Limits = LIMITS, **fields: object) -> list[Outcome]:
        case = {"asserts": list(asserts), **fields} if asserts else fields
        tests = parse_tests(json.dumps(case))
        assert isinstance(tests, CodeTests | FunctionTests)
        return run_functions(sandbox, judge, program, tests, limits)

    return run


def reasons(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.passed == (outcome.reason == "passed") for outcome in outcomes)
    return [outcome.reason for outcome in outcomes]


def test_the_tests_of_the_cheats_can_be_passed(run):
    assert set(reasons(run("import math\ndef double(x): return x * 2", *cheats.TESTS))) == {"passed"}


@pytest.mark.parametrize("name", cheats.CHEATS)
def test_cheating_passes_no_test(run, name):
    outcomes = run(cheats.CHEATS[name], *cheats.TESTS, setup="import math")
    assert not any(outcome.passed for outcome in outcomes), reasons(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*hostile.ON_THE_MACHINE, *hostile.ON_THE_USER])
def test_what_breaks_nothing_in_the_sandbox_breaks_nothing_here(run, name):
    attack = {**hostile.ON_THE_MACHINE, **hostile.ON_THE_USER}[name]
    program = f"BROKEN = []\ndef breach(*what):\n    BROKEN.append(what)\ndef answer():\n    return BROKEN\n{attack}"
    start = time.monotonic()
    assert not run(program, "assert answer()")[0].passed
    assert time.monotonic() - start < 15
    assert reasons(run("def f(): return 1", "assert f() == 1")) == ["passed"]


def test_arguments_change_in_place(run):
    program = """
def reverse(xs): xs.reverse()
def add(d, key, *, value): d[key] = value
def grow(nested): nested[0].append(5); nested.append({6})
"""
    assert (
        reasons(
            run(
                program,
                "xs = [1, 2, 3]\nassert reverse(xs) is None\nassert xs == [3, 2, 1]",
                "d = {}\nadd(d, 'a', value=[1])\nassert d == {'a': [1]}",
                "inner = []\nouter = [inner]\ngrow(outer)\nassert inner == [5] and outer == [[5], {6}]",
            )
        )
        == ["passed"] * 3
    )


def test_objects_of_the_program(run):
    program = """
class Node:
    kinds = ["node"]
    def __init__(self, value): self.value, self.next = value, None
    def __repr__(self): return f"Node({self.value})"
    def __len__(self): return 1 + (len(self.next) if self.next else 0)
    def __getitem__(self, index): return self if index == 0 else self.next[index - 1]
    def __setitem__(self, index, value): self[index].value = value
    def __iter__(self):
        yield self.value
        yield from self.next or ()
def chain(values):
    node = None
    for value in reversed(values):
        node, node.next = Node(value), node
    return node
def chain(values):
    first = Node(values[0])
    if values[1:]: first.next = chain(values[1:])
    return first
def total(node): return sum(node)
def counter():
    n = 0
    while True:
        yield (n := n + 1)
"""
    outcomes = run(
        program,
        "first = chain([1, 2, 3])\nassert first.value == 1 and first.next.value == 2 and first.next.next.next is None",
        "assert list(first) == [1, 2, 3] and len(first) == 3 and first[2].value == 3 and bool(first)",
        "node = Node(5)\nnode.next = first\nassert node.next is first and node.next == first and total(node) == 11",
        "node[1] = 7\nassert first.value == 7 and str(first) == 'Node(7)' and repr(first) == 'Node(7)'",
        "assert isinstance(node, Node) and not isinstance(3, Node) and node.kinds == ['node']",
        "numbers = counter()\nassert next(numbers) == 1 and [next(numbers) for _ in range(3)] == [2, 3, 4]",
        "assert list(zip(counter(), 'ab')) == [(1, 'a'), (2, 'b')]",
        "assert 2 in chain([1, 2]) and 5 not in chain([1, 2])",
    )
    assert reasons(outcomes) == ["passed"] * 8


def test_functions_of_the_tests_are_called_back(run):
    program = """
def apply(f, xs): return [f(x) for x in xs]
def twice(f): return lambda x: f(f(x))
def sort(xs, key): return sorted(xs, key=key)
def attempt(f):
    try:
        return f()
    except ValueError as error:
        return str(error)
"""
    outcomes = run(
        program,
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
        "assert twice(lambda x: x * 3)(2) == 18",
        "assert sort(['bb', 'a'], key=len) == ['a', 'bb'] and apply(str, [1]) == ['1']",
        "def bad(): raise ValueError('no')\nassert attempt(bad) == 'no'",
        "same = lambda: 0\nassert apply(lambda f: f, [same])[0] is same",
    )
    assert reasons(outcomes) == ["passed"] * 5


def test_exceptions_of_the_program(run):
    program = """
class Mine(KeyError): pass
class Other(Exception): pass
errors = {"value": ValueError("text"), "mine": Mine("key"), "other": Other("x"), "exit": SystemExit(3)}
def fail(kind): raise errors[kind]
def group(): raise ExceptionGroup("g", [ValueError()])
"""
    outcomes = run(
        program,
        "try:\n    fail('value')\nexcept ValueError as e:\n    assert str(e) == 'text'\nelse:\n    assert False",
        "try:\n    fail('mine')\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "try:\n    fail('exit')\nexcept SystemExit:\n    pass\nelse:\n    assert False",
        "fail('other')",
        "fail('mine')",
        "group()",
        "assert fail('value') == 1",
    )
    assert reasons(outcomes) == [
        *["passed"] * 3, "raised Other: x", "raised Mine: 'key'", "raised ExceptionGroup: g (1 sub-exception)",
        "raised ValueError: text",
    ]  # fmt: skip


def test_which_names_are_the_programs(run):
    program = "import math\nLIMIT = 7\ndef sum(a): return 42\ndef f(): return helper()\ndef helper(): return 1"
    one = "assert f() == 1"
    assert reasons(run(program, "assert sum([1]) == 42", one, names=["sum"])) == ["passed"] * 2
    assert reasons(run(program, "assert sum([1]) == 1 and LIMIT == 7 and math.pi > 3")) == ["passed"]
    assert reasons(run("def f(): pass", "assert math.pi > f()")) == [
        "the tests raised NameError: name 'math' is not defined"
    ]
    # What the setup defines is the tests', also where the program has it, unless it is declared.
    assert reasons(run(program, "assert helper() == 5 and f() == 1", setup="def helper(): return 5")) == ["passed"]
    setup = "def helper(): return 5\ndef f(): return 0"
    assert reasons(run(program, one, setup=setup, names=["f"])) == ["passed"]
    check = "def check(candidate):\n    assert candidate() == 1\n    assert f() == 1\n    assert helper() == 5"
    assert reasons(run(program, check=check, entry_point="f", setup=setup)) == ["passed"]


def test_the_program_is_not_the_main_module(run):
    program = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int = 2
name = __name__
if __name__ == "__main__":
    raise SystemExit
def total(): return Pair(1).a + Pair(1).b
def read():
    import sys
    print("nothing")
    return sys.stdin.read()
"""
    outcomes = run(program, "assert name == 'solution'", "assert total() == 3", "assert read() == ''")
    assert reasons(outcomes) == ["passed"] * 3


def test_calls_compared_as_the_data_sets_do(run):
    program = """
def pair(a, b): return (a, (b,))
class Solution:
    def lookup(self, table, key): return table.get(key)
"""
    calls = {"function": "pair", "inputs": [[1, 2], [1, 2], [1, 2], [1, 2]]}
    outcomes = run(program, **calls, outputs=[[1, [2]], [[1, [2]]], [1, 2], [[1, [3]]]])
    assert [outcome.passed for outcome in outcomes] == [True, True, False, False]
    calls = {"function": "lookup", "inputs": [[{"1": "a"}, 1], [{"x": "a"}, "x"]], "outputs": ["a", "a"]}
    assert reasons(run(program, **calls)) == ["passed"] * 2
    missing = run("x = 1", function="absent", inputs=[[]], outputs=[1])
    assert reasons(missing) == ["the tests raised NameError: name 'absent' is not defined"]


def test_a_program_that_ends_takes_the_tests_after_it_along(run):
    program = "import os\ndef f(x):\n    return x if x else os._exit(0)"
    hiding = "try:\n    f(0)\nexcept:\n    pass"
    outcomes = run(program, "assert f(1) == 1", hiding, "assert f(1) == 1")
    assert reasons(outcomes) == ["passed", *["exited before the tests ended"] * 2]
    loop = "def f(x):\n    while x: pass\n    return 1"
    assert reasons(run(loop, "assert f(0) == 1", "f(1)", "assert f(0) == 1")) == ["passed", *["time limit"] * 2]
    memory = run("def f(): return bytearray(10**10)", "assert f()", "assert True")
    assert reasons(memory) == ["memory limit", "passed"]
    assert (
        reasons(run("def f(:", "assert f()", "assert True"))
        == ["raised SyntaxError: invalid syntax (solution.py, line 1)"] * 2
    )


def test_tests_that_never_end_are_ended(run):
    outcomes = run("def f(): return 1", "assert f()", "while True: f", "assert f()", limits=Limits(cpu_seconds=0.5))
    assert reasons(outcomes) == ["passed", *["the results took too long to check"] * 2]


def test_judges_of_several_threads_do_not_disturb_each_other(sandbox):
    passed: dict[int, list[bool]] = {}

    def work(number: int) -> None:
        judge = Judge(sandbox)
        tests = parse_tests(json.dumps({"asserts": [f"assert f({number}) == {number}"] * 3}))
        assert isinstance(tests, CodeTests)
        for _ in range(5):
            outcomes = run_functions(sandbox, judge, "def f(x): return x", tests, Limits())
            passed.setdefault(number, []).extend(outcome.passed for outcome in outcomes)
        judge.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == {number: [True] * 15 for number in range(4)}


def test_a_judge_that_is_gone_is_an_error(sandbox):
    judge = Judge(sandbox)
    judge.close()
    tests = parse_tests(json.dumps({"asserts": ["assert f()"]}))
    assert isinstance(tests, CodeTests)
    with pytest.raises(JudgeEndedError):
        run_functions(sandbox, judge, "def f(): return 1", tests, Limits())


def test_one_program_leaves_nothing_to_the_next(run):
    first = "import builtins, math\nbuiltins.leak = math.leak = 1\nopen('/tmp/leak', 'w').write('x')\ndef f(): return 1"
    second = "import builtins, math, os\ndef f(): return hasattr(builtins, 'leak'), hasattr(math, 'leak'), os.listdir()"
    assert reasons(run(first, "assert f() == 1\nimport math\nmath.changed = 1")) == ["passed"]
    assert reasons(
        run(second, "assert f() == (False, False, [])\nimport math\nassert not hasattr(math, 'changed')")
    ) == ["passed"]


def test_packages(sandbox, judge):
    program = """
import numpy as np
def f(): return [np.int64(3), np.float64(0.5), np.bool_(True), np.float32(0.5)]
def g(): return np.arange(3)
"""
    tests = parse_tests(
        json.dumps({"asserts": ["assert f() == [3, 0.5, True, 0.5]", "assert g().tolist() == [0, 1, 2]"]})
    )
    assert isinstance(tests, CodeTests)
    assert "raised ModuleNotFoundError" in run_functions(sandbox, judge, program, tests, Limits())[0].reason
    with_packages = Sandbox(packages=[Path(np.__file__).parents[1]])
    assert reasons(run_functions(with_packages, judge, program, tests, Limits())) == ["passed"] * 2


def test_without_isolation():
    with pytest.warns(RuntimeWarning, match="without_isolation"):
        plain = Sandbox(run_without_isolation=True)
    judge = Judge(plain)
    tests = parse_tests(json.dumps({"asserts": ["assert f(1) == 2"]}))
    assert isinstance(tests, CodeTests)
    programs = ["def f(x): return x + 1", "def f(x): return x", "import os\nos.fork()\ndef f(x): return 2"]
    outcomes = [run_functions(plain, judge, program, tests, Limits())[0].passed for program in programs]
    judge.close()
    assert outcomes == [True, False, False]
