import json
import pickle
import random
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rewards import datasets
from tests.rewards.datasets import Problem
from tests.rewards.mutants import mutants, plain_run_passes
from tests.rewards.sandbox.processes import needs_bubblewrap
from troll.rewards.code import CodeGrader, compute_score, passed_fraction
from troll.rewards.grading import Verdict
from troll.rewards.program import CodeTests, parse_tests
from troll.rewards.sandbox.limits import Limits

pytestmark = needs_bubblewrap

DOUBLE = json.dumps({"asserts": ["assert double(2) == 4", "assert double(3) == 6", "assert double(0) == 0"]})


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(limits=Limits(cpu_seconds=2.0, idle_seconds=2.0))
    yield grader
    grader.close()


def fenced(program: str) -> str:
    return f"The solution is:\n\n```python\n{program}\n```\n\nIt passes all tests.\n"


def failures(grader: CodeGrader, problems: list[Problem]) -> list[str]:
    verdicts = grader.grade([fenced(p.program) for p in problems], tests=[p.tests for p in problems])
    return [
        f"{problem.name}: {verdict.reason}"
        for problem, verdict in zip(problems, verdicts, strict=True)
        if not verdict.success
    ]


def disagreements(grader: CodeGrader, problems: list[Problem], per_program: int) -> tuple[list[str], int, int]:
    """Mutants on which grader and plain run differ, how many were rejected by both, and how many were tried."""
    cases = [
        (problem, mutant)
        for number, problem in enumerate(problems)
        for mutant in mutants(problem.program.replace("\r\n", "\n"), per_program, seed=number)
    ]
    verdicts = grader.grade([fenced(mutant) for _, mutant in cases], tests=[p.tests for p, _ in cases])
    different, rejected = [], 0
    for (problem, mutant), verdict in zip(cases, verdicts, strict=True):
        tests = parse_tests(problem.tests)
        assert isinstance(tests, CodeTests)
        passes = plain_run_passes(mutant, tests.setup, tests.names, tests.tests)
        rejected += not passes and not verdict.success
        if passes != verdict.success:
            different.append(f"{problem.name}: plain run {passes}, grader {verdict.reason}\n{mutant}")
    return different, rejected, len(cases)


@pytest.fixture(scope="module")
def default_grader() -> Iterator[CodeGrader]:
    grader = CodeGrader()
    yield grader
    grader.close()


def test_a_sample_of_the_real_solutions_passes(default_grader):
    chosen = random.Random(0)
    problems = chosen.sample(datasets.humaneval(), 25) + chosen.sample(datasets.mbpp(), 50)
    assert failures(default_grader, problems) == []


@pytest.mark.slow
@pytest.mark.parametrize("source", [datasets.humaneval, datasets.mbpp])
def test_all_real_solutions_pass(default_grader, source):
    problems = source()
    assert len(problems) == {"humaneval": 164, "mbpp": 500}[source.__name__]
    start = time.monotonic()
    assert failures(default_grader, problems) == []
    print(f"{source.__name__}: {len(problems)} programs in {time.monotonic() - start:.1f} s")


def test_a_sample_of_mutants_gets_the_verdict_of_a_plain_run(grader):
    chosen = random.Random(1)
    problems = chosen.sample(datasets.humaneval(), 8) + chosen.sample(datasets.mbpp(), 16)
    different, rejected, count = disagreements(grader, problems, per_program=2)
    assert different == []
    assert rejected > count / 2


@pytest.mark.slow
@pytest.mark.parametrize("source", [datasets.humaneval, datasets.mbpp])
def test_mutants_get_the_verdict_of_a_plain_run(grader, source):
    different, rejected, count = disagreements(grader, source(), per_program=4)
    print(f"{source.__name__}: {rejected} of {count} mutants rejected by both, {len(different)} disagreements")
    assert different == []


def test_the_score_is_the_share_of_passed_tests_and_the_reward_is_all_or_nothing(grader):
    completions = ["def double(x): return x * 2", "def double(x): return 4 if x == 2 else 0", "def double(x): return 1"]
    verdicts = grader.grade(completions, tests=[DOUBLE] * 3)
    assert [verdict.score for verdict in verdicts] == pytest.approx([1, 2 / 3, 0])
    assert verdicts[0] == Verdict(1.0, completions[0], "correct")
    assert [verdict.reason for verdict in verdicts[1:]] == ["wrong answer", "wrong answer"]
    assert grader(["p"] * 3, completions, tests=[DOUBLE] * 3) == [1.0, 0.0, 0.0]
    chats = [[{"role": "assistant", "content": fenced(text)}] for text in completions]
    assert grader(["p"] * 3, chats, tests=[DOUBLE] * 3) == [1.0, 0.0, 0.0]


def test_the_fraction_of_a_graded_batch_runs_nothing_again(grader, monkeypatch):
    reward = passed_fraction(grader)
    assert (grader.__name__, reward.__name__) == ("success", "passed_fraction")
    completions = [f"# {time.time_ns()}\ndef double(x): return 4", "def double(x): return 2 * x"]
    assert grader(["p"] * 2, completions, tests=[DOUBLE] * 2) == [0.0, 1.0]
    monkeypatch.setattr(grader._pool, "submit", None)
    assert reward(["p"] * 2, completions, tests=[DOUBLE] * 2) == pytest.approx([1 / 3, 1.0])
    with pytest.raises(TypeError):  # other completions do run
        reward(["p"], ["def double(x): return x"], tests=[DOUBLE])


def test_equal_programs_run_once(grader, monkeypatch):
    submitted = []
    submit = grader._pool.submit

    def count(*job):
        submitted.append(job)
        return submit(*job)

    monkeypatch.setattr(grader._pool, "submit", count)
    completions = [fenced("def double(x): return x + x"), "def double(x): return x + x\n"] * 3
    other = json.dumps({"asserts": ["assert double(1) == 2"]})
    grader.grade(completions, tests=[DOUBLE, DOUBLE, DOUBLE, DOUBLE, other, DOUBLE])
    assert len(submitted) == 2


def test_a_completion_may_continue_the_prefix(grader):
    prefix = 'def double(x):\n    """Twice."""\n'
    completions = ["    return x * 2\n\nprint(double(1)", "def double(x): return x * 2", "    return x"]
    verdicts = grader.grade(completions, tests=[DOUBLE] * 3, prefix=[prefix] * 3)
    assert [verdict.success for verdict in verdicts] == [True, True, False]


def test_tests_by_standard_input(grader):
    tests = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})
    completions = ["print(2 * int(input()))", "print(2)", "if __name__ == '__main__': print(int(input()) * 2)"]
    verdicts = grader.grade(completions, tests=[tests] * 3)
    assert [verdict.score for verdict in verdicts] == [1.0, 0.5, 1.0]


def test_mistakes_of_the_user_name_the_row(grader):
    with pytest.raises(ValueError, match="row 1: tests take a JSON object"):
        grader.grade(["x", "y"], tests=[DOUBLE, "assert f() == 1"])
    with pytest.raises(ValueError, match="row 0: tests take a JSON object as text, got dict"):
        grader.grade(["x"], tests=[{"asserts": ["assert f() == 1"]}])
    with pytest.raises(ValueError, match="0 values for 1 completions"):
        grader.grade(["x"])
    with pytest.raises(ValueError, match="workers"):
        CodeGrader(workers=0)


def test_whatever_a_completion_holds_it_gets_a_verdict(grader):
    completions = [
        "",
        "```python\n```",
        "no program at all",
        "\x00",
        "\ud800",
        "```" * 10000,
        "def f(" * 10000,
        "x" * 2**21,
    ]
    verdicts = grader.grade(completions, tests=[DOUBLE] * len(completions))
    assert not any(verdict.score for verdict in verdicts)
    assert [verdict.reason for verdict in verdicts[:2]] == ["no program", "no program"]


def test_programs_that_loop_cost_their_limit_once_each(grader):
    programs = [f"# {number}\ndef double(x):\n    while True: pass" for number in range(2)]
    with_others = programs + [f"# {number}\ndef double(x): return 2 * x" for number in range(4)]
    start = time.monotonic()
    verdicts = grader.grade(with_others, tests=[DOUBLE] * 6)
    assert time.monotonic() - start < 30  # of 2 s of CPU each, however many tests
    assert [verdict.reason for verdict in verdicts] == ["time limit"] * 2 + ["correct"] * 4


def test_a_copy_of_a_grader_works(grader):
    copy = pickle.loads(pickle.dumps(grader))
    assert copy(["p"], ["def double(x): return 2 * x"], tests=[DOUBLE]) == [1.0]
    copy.close()
    assert copy(["p"], ["def double(x): return 2 * x"], tests=[DOUBLE]) == [1.0]
    copy.close()


def test_a_closed_grader_makes_no_sandbox_until_it_is_used(monkeypatch):
    grader = CodeGrader(workers=1)
    made = []
    start = grader._start

    def count() -> None:
        made.append(1)
        start()

    monkeypatch.setattr(grader, "_start", count)
    grader.close()
    assert not made
    assert grader(["p"], ["def double(x): return 2 * x"], tests=[DOUBLE]) == [1.0]
    assert made == [1]
    grader.close()


def test_a_forked_process_makes_judges_of_its_own(grader):
    import multiprocessing

    assert grader(["p"], ["def double(x): return 2 * x"], tests=[DOUBLE]) == [1.0]
    program = f"# {time.time_ns()}\ndef double(x): return 2 * x"
    queue = multiprocessing.get_context("fork").Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(
            target=lambda: queue.put(grader(["p"], [program], tests=[DOUBLE]))
        )
        child.start()
    assert queue.get(timeout=30) == [1.0]
    child.join(30)
    assert grader(["p"], [program], tests=[DOUBLE]) == [1.0]


def test_a_judge_that_ends_is_replaced(grader):
    grader(["p"], ["def double(x): return 2 * x"], tests=[DOUBLE])
    for judge in grader._pool._judges:
        judge.process.kill()
        judge.process.wait()
    program = f"# {time.time_ns()}\ndef double(x): return 2 * x"
    assert grader(["p"], [program], tests=[DOUBLE]) == [1.0]


def test_the_signature_of_verl():
    right = compute_score("mbpp", fenced("def double(x): return 2 * x"), DOUBLE, {"index": 3}, unknown=1)
    assert right == {"score": 1.0, "acc": 1.0, "reason": "correct"}
    half = compute_score("mbpp", "def double(x): return 4", DOUBLE, partial=True)
    assert half["score"] == pytest.approx(1 / 3) and half["acc"] == 0.0
    with ThreadPoolExecutor(4) as threads:
        programs = [f"def double(x): return {number} * x" for number in range(8)]
        scores = threads.map(lambda program: compute_score("mbpp", program, DOUBLE)["acc"], programs)
        assert list(scores) == [0, 0, 1, 0, 0, 0, 0, 0]
    assert compute_score("humaneval", "  return 2 * x", DOUBLE, {"prefix": "def double(x):\n"})["score"] == 1.0
