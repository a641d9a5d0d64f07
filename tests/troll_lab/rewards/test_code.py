import contextlib
import json
import math
import multiprocessing
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.troll_lab.rewards import datasets
from tests.troll_lab.rewards.mutants import mutants, plain_run_passes
from tests.troll_sandbox.processes import wait_until
from troll.grading import Verdict
from troll_lab.rewards.code import CodeGrader, compute_score, passed_fraction
from troll_sandbox.errors import SandboxError
from troll_sandbox.limits import Limits, Outcome
from troll_sandbox.supervise import _tree

pytestmark = pytest.mark.needs_bubblewrap

DOUBLE = json.dumps({"asserts": ["assert double(2) == 4", "assert double(3) == 6", "assert double(0) == 0"]})
RIGHT, WRONG = "def double(x): return 2 * x", "def double(x): return x"


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    with closing(CodeGrader(limits=Limits(cpu_seconds=2.0, idle_seconds=2.0))) as grader:
        yield grader


def fresh(program: str = RIGHT) -> str:
    """The program as no grader has seen it."""
    return f"# {time.time_ns()}\n{program}"


def fenced(program: str) -> str:
    return f"The solution is:\n\n```python\n{program}\n```\n\nIt passes all tests.\n"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(("share", "per_program"), [(40, 1), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_mutants_get_the_verdict_of_a_plain_run(grader, share, per_program):
    problems = datasets.humaneval() + datasets.mbpp()
    assert len(problems) == 164 + 500
    cases = [
        (problem, mutant)
        for number, problem in enumerate(problems[::share])
        for mutant in mutants(problem.program.replace("\r\n", "\n"), per_program, seed=number)
    ]
    verdicts = grader.grade([fenced(mutant) for _, mutant in cases], tests=[problem.tests for problem, _ in cases])
    all_tests = [datasets.code_tests(problem.tests) for problem, _ in cases]
    passes = [
        plain_run_passes(mutant, tests.setup, tests.names, tests.tests)
        for (_, mutant), tests in zip(cases, all_tests, strict=True)
    ]
    found = list(zip(cases, passes, verdicts, strict=True))
    assert [each for each in found if each[1] != each[2].success] == []
    assert passes.count(False) > len(cases) / 2


@pytest.mark.parametrize(("partial", "share"), [(True, 2 / 3), (False, 0.0)])
def test_score_is_a_share_only_with_partial_credit(partial, share):
    completions = [RIGHT, "def double(x): return 4 if x == 2 else 0", "def double(x): return 1"]
    with closing(CodeGrader(workers=2, partial_credit=partial)) as grader:
        verdicts = grader.grade(completions, tests=[DOUBLE] * 3)
        assert [verdict.score for verdict in verdicts] == pytest.approx([1, share, 0])
        assert verdicts[0] == Verdict(1.0, RIGHT, "correct")
        assert [verdict.reason for verdict in verdicts[1:]] == ["wrong answer"] * 2
        chats = [[{"role": "assistant", "content": fenced(text)}] for text in completions]
        assert grader(["p"] * 3, chats, tests=[DOUBLE] * 3) == [1.0, 0.0, 0.0]
        tests = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})
        programs = ["print(2 * int(input()))", "print(2)", "if __name__ == '__main__': print(int(input()) * 2)"]
        verdicts = grader.grade(programs, tests=[tests] * 3)
        assert [verdict.score for verdict in verdicts] == [1.0, 0.5 * partial, 1.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"tests": [DOUBLE, "assert f() == 1"]}, "row 1: tests take a JSON object"),
        ({"tests": [{"asserts": ["assert f() == 1"]}, DOUBLE]}, "row 0: tests take a JSON object as text, got dict"),
        ({}, "0 values for 2 completions"),
    ],
)
def test_grade_names_the_row_of_a_mistake(grader, rows, message):
    with pytest.raises(ValueError, match=message):
        grader.grade(["x", "y"], **rows)


def test_grade_gives_every_completion_a_verdict():
    completions = ["", "```python\n```", "no program at all", "\x00", "\ud800", "```" * 10000, "def f(" * 10000]
    completions += ["x" * 2**21, "def double(x):\n    while True: pass"]
    with closing(CodeGrader(limits=Limits(cpu_seconds=0.5), workers=2)) as grader:
        verdicts = grader.grade([*completions, RIGHT], tests=[DOUBLE] * (len(completions) + 1))
    assert [verdict.score for verdict in verdicts] == [0.0] * len(completions) + [1.0]
    assert [verdict.reason for verdict in verdicts[:2]] == ["no program", "no program"]
    assert verdicts[-2].reason == "time limit"


def test_copy_of_a_grader_works_and_again_after_close(grader):
    copy = pickle.loads(pickle.dumps(grader))
    for _ in range(2):
        assert copy(["p"], [RIGHT], tests=[DOUBLE]) == [1.0]
        copy.close()


def test_forked_daemon_makes_judges_of_its_own(grader):
    assert grader(["p"], [RIGHT], tests=[DOUBLE]) == [1.0]
    program, context = fresh(), multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=lambda: queue.put(grader(["p"], [program], tests=[DOUBLE])), daemon=True)
        child.start()
    assert queue.get(timeout=30) == [1.0]
    child.join(30)
    assert grader(["p"], [program], tests=[DOUBLE]) == [1.0]


class Trouble:
    """A sandbox on a machine that comes to its senses after some calls; it remembers what it was given."""

    def __init__(self, calls: float = math.inf, error: str = "no process is left", only: str = "") -> None:
        self.calls, self.error, self.only = calls, error, only
        self.programs: list[str] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, program: str, tests: Any, **options: Any) -> list[Outcome]:
        self.programs.append(program)
        self.options.append(options)
        time.sleep(0.01)
        if self.only in program and self.calls > 0:
            self.calls -= 1
            raise SandboxError(self.error)
        return [Outcome("2 * x" in program, "passed" if "2 * x" in program else "wrong answer")] * 3


def troubled(sandbox: Any, wall_seconds: float = 3.0) -> CodeGrader:
    return CodeGrader(limits=Limits(wall_seconds=wall_seconds), workers=2, sandbox=sandbox)


def test_equal_programs_and_graded_batches_run_once():
    sandbox = Trouble(calls=0)
    grader, other = troubled(sandbox), json.dumps({"asserts": ["assert double(1) == 2"] * 3})
    completions = [fenced("def double(x): return x + x"), "def double(x): return x + x\n"] * 3
    grader.grade(completions, tests=[DOUBLE, DOUBLE, DOUBLE, DOUBLE, other, DOUBLE])
    assert len(sandbox.programs) == 2
    reward = passed_fraction(grader)
    assert (grader.__name__, reward.__name__) == ("success", "passed_fraction")
    for rewarded in (grader, reward, grader):
        assert rewarded(["p"] * 2, [RIGHT, WRONG], tests=[DOUBLE] * 2) == [1.0, 0.0]
    assert len(sandbox.programs) == 4
    reward(["p"] * 2, [WRONG, RIGHT], tests=[DOUBLE] * 2)  # another batch does run
    assert len(sandbox.programs) == 6


def test_programs_that_cannot_be_tested_cost_others_nothing():
    grader = troubled(Trouble(only="pass", error="bwrap\x1b[31m is \ud800 gone"), wall_seconds=0.6)
    completions = [*(f"# {number}\npass" for number in range(4)), RIGHT, WRONG, ""]
    verdicts = grader.grade(completions, tests=[DOUBLE] * 7)
    scores = [None] * 4 + [1.0, 0.0, 0.0]
    assert [verdict.score for verdict in verdicts] == scores
    assert not verdicts[0].success and verdicts[0].answer == completions[0]
    assert verdicts[0].reason.startswith("unscored: bwrap") and verdicts[0].reason.isprintable()
    assert grader(["p"] * 7, completions, tests=[DOUBLE] * 7) == scores
    assert passed_fraction(grader)(["p"] * 7, completions, tests=[DOUBLE] * 7) == scores


def test_machine_that_can_test_nothing_is_not_asked_for_all():
    sandbox = Trouble()
    completions = [f"# {number}\n{RIGHT}" for number in range(50)]
    verdicts = troubled(sandbox, wall_seconds=1.0).grade(completions, tests=[DOUBLE] * 50)
    assert {(verdict.score, verdict.reason) for verdict in verdicts} == {(None, "unscored: no process is left")}
    assert 4 <= len(sandbox.programs) < 20


def test_all_tests_are_run_only_for_a_share():
    sandbox = Trouble(calls=0)
    limits = Limits(cpu_seconds=1.0)
    grader = CodeGrader(limits=limits, workers=1, sandbox=sandbox)
    grader.grade([RIGHT], tests=[DOUBLE])
    copy = pickle.loads(pickle.dumps(grader))
    passed_fraction(grader)
    grader.grade([RIGHT], tests=[DOUBLE])
    assert sandbox.options == [{"limits": limits, "stop_at_failure": stop} for stop in (True, False)]
    assert grader.partial_credit and not copy.partial_credit
    assert pickle.loads(pickle.dumps(grader)).partial_credit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": Trouble(), "packages": ["."]}, "options of bubblewrap"),
        ({"sandbox": Trouble(), "run_without_isolation": True}, "options of bubblewrap"),
        ({"sandbox": "gvisor", "run_without_isolation": True}, "options of bubblewrap"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_code_grader_refuses_options(options, message):
    with pytest.raises(ValueError, match=message):
        CodeGrader(**options)


def started(process: int) -> str | None:
    """When it was, which tells it from another one of that number; None if it has ended."""
    with contextlib.suppress(OSError):
        state, *_, start = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:20]
        return None if state == "Z" else start
    return None


def test_ctrl_c_ends_within_two_seconds():
    program = r"""
import json, signal, time
from troll_lab.rewards.code import CodeGrader
from troll_sandbox.limits import Limits
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
tests = [{"inputs": [""], "outputs": [""]}, {"asserts": ["assert f() == 1"]}]
sleeping = "import time\nprint('x', flush=True)\ntime.sleep(100)\ndef f(): return 1"
grader = CodeGrader(limits=Limits(idle_seconds=100.0, wall_seconds=100.0), workers=2)
print("ready", flush=True)
try:
    grader.grade([f"# {n}\n{sleeping}" for n in range(4)], tests=list(map(json.dumps, 2 * tests)))
except KeyboardInterrupt:
    print(time.monotonic())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_until(lambda: len(_tree(process.pid)) > 8)  # two programs and a judge, in sandboxes
        assert process.poll() is None
        children = [(child, started(child)) for child in _tree(process.pid)[1:]]
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)  # the interpreter's own end takes its time on a busy machine
    assert not errors
    assert 0 <= float(output) - begin < 2
    wait_until(lambda: not [child for child, start in children if started(child) == start], 5)


def test_interrupted_batch_has_no_verdicts_and_can_run_again(monkeypatch):
    grader, program = troubled(Trouble(calls=0)), fresh()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
        grader.grade([program], tests=[DOUBLE])
    assert grader(["p"], [program], tests=[DOUBLE]) == [1.0]


def test_compute_score_raises_with_the_cause_of_trouble(monkeypatch):
    grader = troubled(Trouble(), wall_seconds=0.1)
    monkeypatch.setattr("troll_lab.rewards.code._default_grader", lambda *_: grader)
    with pytest.raises(SandboxError, match="a completion is unscored: no process is left"):
        compute_score("mbpp", RIGHT, DOUBLE)


def test_compute_score_has_the_signature_of_verl():
    right = compute_score("mbpp", fenced(RIGHT), DOUBLE, {"index": 3}, unknown=1)
    assert right == {"score": 1.0, "acc": 1.0, "reason": "correct"}
    half = compute_score("mbpp", "def double(x): return 4", DOUBLE, partial=True)
    assert half["score"] == pytest.approx(1 / 3) and half["acc"] == 0.0
    with ThreadPoolExecutor(4) as threads:
        programs = [f"def double(x): return {number} * x" for number in range(8)]
        scores = threads.map(lambda program: compute_score("mbpp", program, DOUBLE)["acc"], programs)
        assert list(scores) == [0, 0, 1, 0, 0, 0, 0, 0]
    assert compute_score("humaneval", "  return 2 * x", DOUBLE, {"prefix": "def double(x):\n"})["score"] == 1.0
