import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.rewards.sandbox import cheats, hostile
from tests.rewards.sandbox.processes import needs_bubblewrap, start_at_the_third_attempt_only, wait_until_gone
from troll.rewards.program import CodeTests, FunctionTests, parse_tests
from troll.rewards.sandbox.bubblewrap import Sandbox, SandboxError
from troll.rewards.sandbox.functions import JudgeEndedError, run_functions
from troll.rewards.sandbox.judge import Judge
from troll.rewards.sandbox.limits import Limits, Outcome

pytestmark = needs_bubblewrap

LIMITS = Limits(cpu_seconds=1.0, idle_seconds=1.0, wall_seconds=20.0)

#: A mark that stands in the command line of everything in a sandbox.
MARK = 4_000_000 + os.getpid() % 100_000

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


@pytest.mark.parametrize("name", cheats.CALLBACKS)
def test_functions_that_tests_pass_build_nothing_that_equals_everything(run, name):
    test, program = cheats.CALLBACKS[name]
    assert not run(program, test)[0].passed


@pytest.fixture
def trace(sandbox, monkeypatch) -> Iterator[Callable[[str], tuple[str, Callable[[], bytes]]]]:
    """Gives programs a function `breach` that this process hears of, however they end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    monkeypatch.setattr(sandbox, "start", partial(sandbox.start, pass_fds=[write]))

    def traced(program: str) -> tuple[str, Callable[[], bytes]]:
        breach = f"def breach(*what, write=__import__('os').write):\n    write({write}, repr(what).encode())\n"
        return breach + program, heard

    def heard() -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(read, 1000)
        return b""

    yield traced
    os.close(read)
    os.close(write)


def test_a_breach_is_heard_of(run, trace):
    program, heard = trace("import os\nbreach('here')\nos.abort()")
    assert not run(program, "assert f()")[0].passed
    assert heard() == b"('here',)"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*hostile.ON_THE_MACHINE, *hostile.ON_THE_USER])
def test_what_breaks_nothing_in_the_sandbox_breaks_nothing_here(run, trace, name):
    program, heard = trace({**hostile.ON_THE_MACHINE, **hostile.ON_THE_USER}[name])
    start = time.monotonic()
    assert not run(program, "assert answer()", limits=replace(LIMITS, output_bytes=MARK))[0].passed
    assert time.monotonic() - start < 15
    assert heard() == b""
    wait_until_gone(f",{MARK},")
    assert reasons(run("def f(): return 1", "assert f() == 1")) == ["passed"]


@pytest.mark.parametrize("answer", ["sleep", "return"])
def test_no_program_outlives_its_verdict(run, answer):
    limits = replace(LIMITS, output_bytes=MARK)
    if answer == "sleep":
        program = f"{hostile.OUTLIVING}\ndef f(x):\n    os.closerange(0, 64)\n    time.sleep(1000)"
    else:  # and stays when the channel is closed
        patch = "sys.modules['peer'].Peer._receive = lambda *_: time.sleep(1000)"
        program = (
            f"import sys\n{hostile.OUTLIVING.replace('os.closerange(3, 64)', '')}\ndef f(x):\n    {patch}\n    return x"
        )
    start = time.monotonic()
    assert reasons(run(program, "assert f(1) == 1", limits=limits)) == [
        "passed" if answer == "return" else "exited before the tests ended"
    ]
    assert time.monotonic() - start < LIMITS.idle_seconds  # nobody waits for it to end
    wait_until_gone(f",{MARK},")
    signal_kept = "import ctypes\ndef f(): return ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"
    assert reasons(run(signal_kept, "assert f() == -1")) == ["passed"]


def test_a_program_that_passes_all_tests_in_too_much_time_fails(run):
    program = """
import time
def f(x):
    end = time.process_time() + x
    while time.process_time() < end: pass
    return 1
"""
    assert reasons(run(program, "assert f(0.2) == 1", "assert f(0.2) == 1")) == ["passed"] * 2
    limits = replace(LIMITS, cpu_seconds=0.3)
    assert reasons(run(program, "assert f(0.2) == 1", "assert f(0.2) == 1", limits=limits)) == ["passed", "time limit"]


def test_a_program_that_drips_is_idle(run):
    work = "def work(end=0.002):\n    end += time.process_time()\n    while time.process_time() < end: pass\n"
    program = f"import time\n{work}def f():\n    while True:\n        time.sleep(0.08)\n        work()"
    start = time.monotonic()
    assert reasons(run(program, "assert f()", limits=Limits(idle_seconds=1.0))) == ["idle limit"]
    assert time.monotonic() - start < 20


def test_a_long_reason_stays_within_what_is_read(run):
    outcomes = run("def f(): raise ValueError(chr(0x1F600) * 600)", *["assert f()"] * 3)
    assert [len(outcome.reason) for outcome in outcomes] == [200] * 3


def test_a_sandbox_that_does_not_start_is_no_verdict(sandbox, judge, monkeypatch):
    start_at_the_third_attempt_only(sandbox, monkeypatch)
    tests = parse_tests(json.dumps({"asserts": ["assert f() == 1"]}))
    assert isinstance(tests, CodeTests)
    assert reasons(run_functions(sandbox, judge, "def f(): return 1", tests, LIMITS)) == ["passed"]
    with pytest.raises(SandboxError, match="no longer starts"):
        run_functions(sandbox, judge, "def f(): return 1", tests, LIMITS)


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
def each(function, *args, **kwargs): return function(*args, **kwargs)
def named(self): return self
def total(xs): return sum(xs)
def fill(grid): grid[0][0] = 5
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
        "seen = []\nassert apply(seen.append, [1, [2]]) == [None, None] and seen == [1, [2]]",
        "counts = {'a': 2, 'b': 1}\nassert sort(['a', 'b'], counts.get) == ['b', 'a']",
        "import operator as o\nassert each(o.add, 1, 2) == 3 and sort(['ab', 'ba'], o.itemgetter(1))[0] == 'ba'",
        "import functools, math\nassert each(functools.partial(pow, 2), 3) == 8 and each(math.gcd, 4, 6) == 2",
        "from functools import partial\nassert each(partial(lambda kind: kind.__name__, Exception)) == 'Exception'",
        "class A:\n    def two(self): return 2\nassert each(A().two) == 2 and apply(str.upper, ['a']) == ['A']",
        "assert each(map, lambda x: x, [1]) and each(type, 1) is int",
        "assert named(self=3) == 3",
        "assert total(x for x in [1, 2]) == 3 and total({1: 2}.values()) == 2 and total(iter([4])) == 4",
        "grid = [[0] * 2] * 2\nfill(grid)\nassert grid == [[5, 0], [5, 0]]",
    )
    assert reasons(outcomes) == ["passed"] * 15


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


def test_a_judge_that_ends_amid_a_program_fails_no_program(sandbox):
    judge = Judge(sandbox)
    tests = parse_tests(json.dumps({"asserts": ["assert f(0) == 1", "assert f(0.6) == 1"]}))
    assert isinstance(tests, CodeTests)
    threading.Timer(0.3, judge.process.kill).start()
    with pytest.raises(JudgeEndedError):
        run_functions(sandbox, judge, "import time\ndef f(x):\n    time.sleep(x)\n    return 1", tests, Limits())
    judge.close()


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
