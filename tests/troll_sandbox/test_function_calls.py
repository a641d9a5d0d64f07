import contextlib
import json
import math
import os
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.troll_sandbox import hostile
from tests.troll_sandbox.processes import CALLS as LIMITS
from tests.troll_sandbox.processes import code_tests, reasons, run_in, wait_until_gone
from troll_sandbox import function_calls
from troll_sandbox.bubblewrap import Bubblewrap
from troll_sandbox.cases import CodeTests
from troll_sandbox.executor import Executor, Job
from troll_sandbox.function_calls import ENDED, Judge, JudgeEndedError, run_functions
from troll_sandbox.launch import Process
from troll_sandbox.limits import PASSED, Limits
from troll_sandbox.local import LocalSandbox
from troll_sandbox.supervise import _tree

pytestmark = pytest.mark.needs_bubblewrap

#: A mark in the command line of every process in a sandbox.
MARK = 4_000_000 + os.getpid() % 100_000


def test_judge_refuses_questions_to_a_result(run):
    program = """
class Yes:
    equals = equal = allclose = isclose = identical = issubset = startswith = lambda self, *others: True
def double(x): return Yes()
class Point:
    def __init__(self, x): self.x = x
    def equals(self, other): return self.x == other.x
    def startswith(self, text): return True
"""
    questions = ["equals", "equal", "allclose", "isclose", "identical", "issubset", "startswith"]
    found = reasons(run(program, *(f"assert double(2).{name}([4])" for name in questions)))
    assert all("is a question" in reason for reason in found)
    right = "assert Point(1).equals(Point(1)) and Point(1).startswith('a') and 'ab'.startswith('a')"
    assert reasons(run(program, right)) == ["passed"]


ANY_NAME = "has an attribute of any name"


@pytest.mark.parametrize("answer", ["lambda *others: True", "self", "Yes.answer"])
def test_judge_refuses_methods_of_any_name(run, answer):
    program = f"""
class Yes:
    def answer(*others): return True
    __call__ = answer
    def __getattr__(self, name): return {answer}
class Meta(type):
    __getattr__ = Yes.__getattr__
class All(metaclass=Meta): pass
yes = Yes()
def double(x): return All if x == 5 else yes
class Failed(Exception):
    __getattr__ = Yes.__getattr__
def fail(): raise Failed
"""
    calls = [f"double(2).{name}([4])" for name in ("eq", "compare", "matches", "has", "is_what_is_expected")]
    calls += ["double(5).eq([10])", "getattr(double(2), 'eq', None)([4])", "yes.eq([4])", "[double(2)][0].eq([4])"]
    asserts = [f"assert {call}" for call in calls]
    asserts += ["assert hasattr(double(2), 'eq')", "assert not hasattr(double(2), 'eq')"]
    asserts += ["try:\n    fail()\nexcept Failed as error:\n    assert error.eq([4])"]
    assert [reason for reason in reasons(run(program, *asserts)) if ANY_NAME not in reason] == []


def test_judge_takes_objects_with_getattr(run):
    program = """
from types import SimpleNamespace
from unittest.mock import Mock
class Record:
    def __init__(self, fields): self.__dict__["fields"] = fields
    def __getattr__(self, name): return self.fields[name]
class Wrapper:
    def __init__(self, thing): self.__dict__["thing"] = thing
    def __getattr__(self, name): return getattr(self.thing, name)
class Lenient:
    def __getattr__(self, name): return None
class Path:
    def __init__(self, *parts): self.parts = parts
    def __getattr__(self, name): return Path(*self.parts, name)
    def __call__(self): return "/".join(self.parts)
def record(**fields): return Record(fields)
def wrapped(items): return Wrapper(items)
def plain(**fields): return SimpleNamespace(**fields)
def lenient(): return Lenient()
def mock(): return Mock()
def path(): return Path()
"""
    outcomes = run(
        program,
        "found = record(a=1, f=lambda: 2)\nassert found.a == 1 and found.f() == 2",
        "items = wrapped([1])\nitems.append(2)\nassert items.index(2) == 1 and items.thing == [1, 2]",
        "found = plain(a=1, f=len)\nassert found.a == 1 and found.f('ab') == 2 and not hasattr(found, 'b')",
        "assert lenient().anything is None",
        "assert Path().users.parts == ('users',) and Path('a').b() == 'a/b'",  # the class itself is tested
    )
    assert reasons(outcomes) == ["passed"] * 5
    refused = reasons(
        run(program, "assert mock().eq(4)", "mock().assert_called_once", "assert path().users() == 'users'")
    )
    assert all(ANY_NAME in reason for reason in refused)


def test_failed_tests_have_reasons(run, plain):
    program = "import os\ndef f(x):\n    if x == 3: os._exit(0)\n    return [0] * 10**10 if x == 2 else x"
    hiding = "try:\n    f(3)\nexcept BaseException:\n    pass"
    asserts = ["assert f(1) == 1", "assert f(1) == 2", "assert f(2)", "f(1).x", hiding, "assert f(1) == 1"]
    missing = ("" if plain else "the tests ") + "raised AttributeError: 'int' object has no attribute 'x'"
    wanted = ["passed", "wrong answer", "memory limit", missing, *["exited before the tests ended"] * 2]
    assert reasons(run(program, *asserts, plain=plain)) == wanted
    syntax = "raised SyntaxError: invalid syntax (solution.py, line 1)"
    assert reasons(run("def f(:", "assert f()", "assert True", plain=plain)) == [syntax] * 2
    loop = "def f(x):\n    while x: pass\n    return 1"
    assert reasons(run(loop, "assert f(0)", "f(1)", "assert f(0)", plain=plain)) == ["passed", *["time limit"] * 2]


@pytest.mark.parametrize(
    "leave", ["os._exit(137)", "os._exit(137 + 256)", "sys.exit(137)", "os.kill(os.getpid(), 9)", "os.abort()"]
)
def test_run_functions_takes_no_exit_for_a_kill(sandbox, judge, plain, leave):
    tests = code_tests("assert f(1)", plain=plain)
    [outcome] = run_functions(sandbox, judge, f"import os, sys\ndef f(x):\n    {leave}", tests, LIMITS)
    assert not outcome.passed


LINES = ["", "[", "{}", "[true]", "5", "[" * 10**5, "[true, 5]", "[1, 'x']", '[1, "passed"]', '[true, "passed"]']


@pytest.mark.parametrize("line", LINES)
def test_forged_reports_of_plain_tests_raise_nothing(run, line):
    program = f"""
import os, sys
frame = sys._getframe()
while "mark" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["report"], (frame.f_locals["mark"] + {line!r} + "\\n").encode())
os._exit(0)
"""
    # A program can fake a pass of plain tests.
    assert run(program, "assert f()", plain=True)[0].passed == (line == LINES[-1])


def test_run_functions_can_stop_at_the_first_failure(run, plain):
    asserts = ["assert f(1) == 1", "assert f(1) == 2", "assert f(0) == 0", "while True: pass"]
    start = time.monotonic()
    outcomes = run("def f(x): return x", *asserts, plain=plain, limits=Limits(), stop_at_failure=True)
    assert reasons(outcomes) == ["passed", "wrong answer", "not run", "not run"]
    assert time.monotonic() - start < Limits().cpu_seconds
    broken = run("f = 1 / 0", *asserts, plain=plain, stop_at_failure=True)
    assert reasons(broken) == ["raised ZeroDivisionError: division by zero", *["not run"] * 3]


def test_run_functions_shares_cpu_time_among_tests(run, plain):
    program = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.2)\ndef f(x): return x"
    asserts = ["assert f(1) == 1", "assert f(1) == 2", "assert f(0) == 0"]
    measured = [outcome.cpu_seconds for outcome in run(program, *asserts, plain=plain)]
    assert measured[0] == measured[1] == measured[2]
    assert 0.3 <= sum(measured) < 0.45  # without the sleep
    stopped = run(program, *asserts, plain=plain, stop_at_failure=True)
    assert [outcome.cpu_seconds is None for outcome in stopped] == [False, False, True]


@pytest.mark.parametrize("answer", ["sleep", "return"])
def test_programs_do_not_outlive_their_verdict(run, answer):
    limits = replace(LIMITS, idle_seconds=10.0, output_bytes=MARK)
    program = hostile.PRELUDE + hostile.OUTLIVING
    if answer == "sleep":
        program += "def f(x):\n    os.closerange(0, 64)\n    time.sleep(1000)"
    else:  # and it does not end when the channel is closed
        patch = "sys.modules['peer'].Peer._receive = lambda *_: time.sleep(1000)"
        program = program.replace("os.closerange(3, 64)", "") + f"def f(x):\n    {patch}\n    return x"
    start = time.monotonic()
    assert reasons(run(program, "assert f(1) == 1", limits=limits)) == ["passed" if answer == "return" else ENDED]
    assert time.monotonic() - start < limits.idle_seconds  # no idle limit was awaited
    wait_until_gone(f",{MARK},")


def test_time_limit_holds_for_all_tests_together(run):
    program = """
import time
def f(x):
    end = time.process_time() + x
    while time.process_time() < end: pass
    return 1
"""
    limits = replace(LIMITS, cpu_seconds=2.0)
    assert reasons(run(program, "assert f(0.2) == 1", "assert f(0.2) == 1", limits=limits)) == ["passed"] * 2
    limits = replace(LIMITS, cpu_seconds=0.3)
    assert reasons(run(program, "assert f(0.2) == 1", "assert f(0.2) == 1", limits=limits)) == ["passed", "time limit"]


def test_judge_cuts_long_reasons(run):
    outcomes = run("def f(): raise ValueError(chr(0x1F600) * 600)", *["assert f()"] * 3)
    assert [len(outcome.reason) for outcome in outcomes] == [200] * 3


def test_exceptions_arrive_as_twins_of_their_class(run):
    program = """
class Base(Exception): pass
class Mine(Base, KeyError):
    kinds = ["a"]
    def __init__(self, code, *more):
        super().__init__(f"code {code}", *more)
        self.code = code
    def twice(self): return 2 * self.code
def fail(code): raise Mine(code, [code])
def leave(): raise SystemExit(3)
def group(): raise ExceptionGroup("g", [ValueError()])
def call(f):
    try:
        return f()
    except Mine as error:
        return ("mine", error.code)
    except ValueError as error:
        return ("value", error.args)
"""
    outcomes = run(
        program,
        "try:\n    fail(3)\nexcept Mine as e:\n    assert e.code == 3 and e.twice() == 6 and e.args == ('code 3', [3])",
        "try:\n    fail(3)\nexcept Base as e:\n    assert type(e) is Mine and issubclass(Mine, (Base, KeyError))",
        "try:\n    fail(3)\nexcept KeyError as e:\n    assert isinstance(e, Mine) and str(e) == str(Mine(3, [3]))",
        "try:\n    raise Mine(4)\nexcept Mine as e:\n    assert e.code == 4 and Mine.kinds == ['a']",
        # An exception that comes back to the side that raised it is the same object.
        "def back(): raise Mine(5)\nassert call(back) == ('mine', 5) and call(lambda: fail(6)) == ('mine', 6)",
        "class Own(Exception): pass\ndef own(): raise Own('x')\ntry:\n    call(own)\n"
        "except Own as e:\n    assert str(e) == 'x'\nelse:\n    assert False",
        "def bad(): raise ValueError(1, 'two')\nassert call(bad) == ('value', (1, 'two'))",
        "try:\n    leave()\nexcept SystemExit:\n    pass\nelse:\n    assert False",
        "def wrong(): assert False\ncall(wrong)",
        "fail(7)",
        "group()",
    )
    refused = ["wrong answer", "raised Mine: ('code 7', [7])", "raised ExceptionGroup: g (1 sub-exception)"]
    assert reasons(outcomes) == [*["passed"] * 8, *refused]


@pytest.mark.parametrize(
    "lineage",
    [
        "('X', X, (('Y', 1, ()),))", "('X', X, ())", "('X', X, 5)", "(1, X, (E,))", "5", "('X',)", "(X, X, X)", "int",
        "('X', 5, (E,))", "('X', X, (int,))", "('a\\0', X, (E,))", "('X', X, (KeyError, OSError, E))",
    ],
)  # fmt: skip
def test_forged_exceptions_pass_no_test(run, lineage):
    program = f"""
import sys
peer = sys.modules["peer"]
class X(Exception): pass
E = Exception
peer.describe = lambda error: ({lineage}, "text", (), error)
def double(x): raise X
"""
    test = "try:\n    double(1)\nexcept ValueError:\n    pass\nassert double(2) == 4"
    assert not run(program, test)[0].passed


def test_judge_takes_names_from_program_or_setup(run):
    program = "import math\nLIMIT = 7\ndef sum(a): return 42\ndef f(): return helper()\ndef helper(): return 1"
    one = "assert f() == 1"
    assert reasons(run(program, "assert sum([1]) == 42", one, names=["sum"])) == ["passed"] * 2
    assert reasons(run(program, "assert sum([1]) == 1 and LIMIT == 7 and math.pi > 3")) == ["passed"]
    assert reasons(run("def f(): pass", "assert math.pi > f()")) == [
        "the tests raised NameError: name 'math' is not defined"
    ]
    # A name that the setup defines is the setup's, even if the program has it too, unless `names` has it.
    assert reasons(run(program, "assert helper() == 5 and f() == 1", setup="def helper(): return 5")) == ["passed"]
    setup = "def helper(): return 5\ndef f(): return 0"
    assert reasons(run(program, one, setup=setup, names=["f"])) == ["passed"]
    check = "def check(candidate):\n    assert candidate() == 1\n    assert f() == 1\n    assert helper() == 5"
    assert reasons(run(program, check=check, entry_point="f", setup=setup)) == ["passed"]


def test_function_tests_compare_as_the_data_sets_do(run):
    program = """
class Solution:
    def lookup(self, table, key): return table.get(key)
def keyed(d): return {k: [{v: d}] for k, v in sorted(d.items())}
def texts(d): return {'1': 2}
def inner(xs): return [sum(x) for x in xs] + [{1: 2, '1': 2}][:len(xs) - 1]
"""

    def passed(function, inputs, outputs):
        return [outcome.passed for outcome in run(program, function=function, inputs=inputs, outputs=outputs)]

    assert passed("keyed", [[{"1": 5}]] * 2, [{"1": [{"5": {"1": 5}}]}, {"1": [{"5": {"01": 5}}]}]) == [True, False]
    assert passed("texts", [[[{"7": 1}]]], [{"1": 2}]) == [True]
    nested = [[[{"7": 1}]], [[{"7": 1}, {"1": 1}]]]
    assert passed("inner", nested, [[7], [7, 1, {"1": 2}]]) == [True, False]
    assert passed("lookup", [[{"1": "a"}, 1], [{"x": "a"}, "x"]], ["a", "a"]) == [True, True]
    missing = run("x = 1", function="absent", inputs=[[]], outputs=[1])
    assert reasons(missing) == ["the tests raised NameError: name 'absent' is not defined"]


DEEP: Any = json.loads("[" * 701 + "]" * 701)
VALUES = [[[[]]], DEEP, {"1": {"a": DEEP}}, math.nan, [math.inf], "\ud800", 10**4000, -0.0]
OTHERS = "def depth(x): return 1 + depth(x[0]) if x else 0\ndef text(x): return str(10**x)\n"
OTHERS += "def count(n): return n and 1 + count(n - 1)"


@pytest.mark.parametrize(
    ("function", "inputs", "outputs"),
    [
        ("f", VALUES, VALUES),
        ("depth", [DEEP], [700]),
        ("text", [9000], ["1" + "0" * 9000]),
        ("count", [20000], [20000]),
    ],
)
def test_function_tests_take_any_json_value(run, function, inputs, outputs):
    program, inputs = f"def f(x): return x\n{OTHERS}", [[each] for each in inputs]
    found = reasons(run(program, function=function, inputs=inputs, outputs=outputs, limits=Limits()))
    assert found == ["passed"] * len(outputs)


def test_judge_takes_long_numbers_and_deep_values(run, plain):
    digits = "7" * 5000
    asserts = [f"assert f({digits}) == -{digits}", "assert len(str(f(10**5000))) == 5002"]
    asserts += ["value = []\nfor _ in range(3000): value = [value]\nassert g(value) == value != [value]"]
    program = "def f(x): return -x\ndef g(x): return x"
    assert reasons(run(program, *asserts, plain=plain, limits=Limits())) == ["passed"] * 3


STARTER = """
class Solution:
    def f(self, nums: List[int], k: Optional[int] = None) -> Dict[str, int]:
        return sum(accumulate(deque(sorted(nums)[bisect_left(nums, 0):])))
"""


def test_prelude_is_for_programs_and_not_for_tests(run, plain):
    leak = "assert math.floor(Solution().f([1, 2])) == 4 and List"
    found = reasons(run(STARTER, "assert Solution().f([1, 2]) == 4", leak, plain=plain))
    assert found[0] == "passed" and "NameError: name 'math' is not defined" in found[1]
    [other] = reasons(run("def f(x: List[int]): return 1", "assert f(1)", plain=plain))
    assert "raised NameError: name 'List'" in other
    if not plain:
        assert reasons(run(STARTER, function="f", inputs=[[[1, 2]]], outputs=[4])) == ["passed"]
        assert "line 3" in run("\n\ndef f(:", function="f", inputs=[[1]], outputs=[1])[0].reason


def test_judge_ends_tests_that_do_not_end(run):
    outcomes = run("def f(): return 1", "assert f()", "while True: f", "assert f()", limits=Limits(cpu_seconds=0.25))
    assert reasons(outcomes) == ["passed", *["the results took too long to check"] * 2]


def test_long_call_in_the_judge_is_not_repeated(run, monkeypatch):
    run_judged = Mock(wraps=function_calls._run_judged)
    monkeypatch.setattr(function_calls, "_run_judged", run_judged)
    limits = Limits(cpu_seconds=0.25, wall_seconds=60)
    program = "def f(): return range(10 ** 15)"  # no signal handler runs during its sum
    assert reasons(run(program, "assert sum(f()) == 1", limits=limits)) == ["the results took too long to check"]
    assert run_judged.call_count == 1


def test_read_does_not_wait_for_a_judge_in_a_long_call(monkeypatch):
    ended: Any = SimpleNamespace(period=0.01, verdict=lambda: "wall", end=lambda: 0.0)
    monkeypatch.setattr(function_calls, "END_SECONDS", 0.1)
    report, theirs = os.pipe()
    os.write(theirs, b"text")
    assert function_calls._read(ended, ended, report, 1000) == (b"text", "wall")
    os.close(report)
    os.close(theirs)


def test_judge_that_ends_raises(sandbox):
    program = "import time\ndef f(x):\n    time.sleep(x)\n    return 1"
    with closing(Judge(sandbox)) as judge:
        assert run_in(sandbox, judge, program, "assert f(0) == 1")[0].passed  # it has started
        threading.Timer(0.3, judge.process.kill).start()
        for seconds in (1.5, 0):  # and it stays gone
            with pytest.raises(JudgeEndedError):
                run_in(sandbox, judge, program, f"assert f({seconds}) == 1", limits=Limits())


def test_tests_can_have_annotations(run, plain):
    program = "class Node: pass\ndef f(n): return n"
    annotated = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
    annotated += "def g(node: Node | None, kind: type[int] = int) -> list[Node]: pass\n"
    test = "assert f(P(1).x) == 1 and P(2) == P(2)"
    for setup in (annotated, f"from __future__ import annotations\n{annotated}"):
        assert reasons(run(program, test, setup=setup, plain=plain)) == ["passed"]
    assert reasons(run(program, f"{annotated}{test}", plain=plain)) == ["passed"]


def test_random_kills_fail_no_program(sandbox, monkeypatch, plain):
    chosen, start = random.Random(0), sandbox.start
    local = LocalSandbox(sandbox, sandbox)
    started: list[Process] = []
    program = "import time\ndef f(x):\n    time.sleep(0.1)\n    return x"
    tests = CodeTests(("assert f(1) == 1", "assert f(2) == 2"), "", ("f",), (), (), plain)
    killed = []

    def note(*arguments: Any, **options: Any) -> Process:
        started.append(start(*arguments, **options))
        return started[-1]

    def kill() -> None:
        tree = _tree(chosen.choice([started[-1], *(judge.process for judge in local._judges)]).pid)
        with contextlib.suppress(ProcessLookupError):
            killed.append(chosen.choice(tree))
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(sandbox, "start", note)
    with closing(Executor(lambda: (local, None), Limits(), workers=1)) as executor:
        for _ in range(4):
            timer = threading.Timer(chosen.uniform(0.05, 0.35), kill)
            timer.start()
            assert executor.run([Job(program, tests, False)]) == [[PASSED] * 2]
            timer.join()
    assert len(killed) == 4


def test_programs_leave_nothing_to_the_next(run):
    first = "import builtins, math\nbuiltins.leak = math.leak = 1\nopen('/tmp/leak', 'w').write('x')\ndef f(): return 1"
    second = "import builtins, math, os\ndef f(): return hasattr(builtins, 'leak'), hasattr(math, 'leak'), os.listdir()"
    assert reasons(run(first, "assert f() == 1\nimport math\nmath.changed = 1")) == ["passed"]
    assert reasons(
        run(second, "assert f() == (False, False, [])\nimport math\nassert not hasattr(math, 'changed')")
    ) == ["passed"]


def test_run_functions_works_without_isolation():
    with pytest.warns(RuntimeWarning, match="without_isolation"):
        plain = Bubblewrap(run_without_isolation=True)
    programs = ["def f(x): return x + 1", "def f(x): return x", "import os\nos.fork()\ndef f(x): return 2"]
    with closing(Judge(plain)) as judge:
        outcomes = [run_in(plain, judge, each, "assert f(1) == 2", limits=Limits())[0].passed for each in programs]
    assert outcomes == [True, False, False]
