import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, pairwise, repeat
from typing import Any
from unittest.mock import Mock, call

import pytest

from troll_sandbox import executor as executor_module
from troll_sandbox.cases import CodeTests, StreamTests, Tests
from troll_sandbox.errors import KilledError, SandboxError, StarvedError
from troll_sandbox.executor import KILLS, Executor, Job, _Crew, _Trial
from troll_sandbox.limits import NOT_RUN, PASSED, TIME_LIMIT, Limits, Outcome

TESTS = StreamTests(("",), ("",))
CALLS = CodeTests(("assert f()",) * 2, "", ("f",), (), ())
SHORT = Limits(wall_seconds=0.1)
FAILED = Outcome(False, "wrong answer")


def executor(sandbox: Any, limits: Limits = SHORT, workers: int = 1, stop: Any = None) -> Executor:
    return Executor(lambda: (sandbox, stop), limits, workers)


def passing(*_: Any, **__: Any) -> list[Outcome]:
    return [PASSED]


class Waiting:
    """A sandbox that answers after it was ended."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()
        self.programs: list[str] = []

    def __call__(self, program: str, *_: Any, **__: Any) -> list[Outcome]:
        self.programs.append(program)
        if len(self.programs) > 1:
            return [PASSED]
        self.started.set()
        self.ended.wait(30)
        return [Outcome(False, "the sandbox ended early")]


def found(sandbox: Any, limits: Limits = SHORT, tests: Tests = TESTS) -> Any:
    with closing(executor(sandbox, limits)) as running:
        [result] = running.run([Job("a", tests, True)])
    return result


def test_run_passes_arguments_to_the_sandbox() -> None:
    sandbox, limits = Mock(return_value=[PASSED]), Limits(cpu_seconds=1.0)
    with closing(executor(sandbox, limits)) as running:
        assert running.run([Job("a", TESTS, True), Job("b", TESTS, False)]) == [[PASSED], [PASSED]]
    assert sandbox.call_args_list == [
        call(program, TESTS, limits=limits, stop_at_failure=stop) for program, stop in (("a", True), ("b", False))
    ]


def test_run_tests_one_program_per_worker_at_a_time() -> None:
    together = threading.Barrier(3)

    def sandbox(*_: Any, **__: Any) -> list[Outcome]:
        together.wait(10)
        return [PASSED]

    with closing(executor(sandbox, Limits(), workers=3)) as running:
        assert running.run([Job(str(number), TESTS, True) for number in range(6)]) == [[PASSED]] * 6


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SandboxError("no namespaces"), "no namespaces"),
        (MemoryError(), "a program could not be tested: MemoryError: "),
        (KeyError("mine"), "a program could not be tested: KeyError: 'mine'"),
    ],
)
def test_run_returns_any_exception_as_sandbox_error(error: BaseException, message: str) -> None:
    trouble = found(Mock(side_effect=error))
    assert isinstance(trouble, SandboxError) and str(trouble) == message
    assert error in (trouble, trouble.__cause__)


@pytest.mark.parametrize("outcomes", [[], [PASSED] * 2])
def test_run_requires_an_outcome_for_every_test(outcomes: list[Outcome]) -> None:
    trouble = found(lambda *_, **__: outcomes)
    assert isinstance(trouble, SandboxError)
    assert str(trouble) == f"the sandbox has {len(outcomes)} outcomes for 1 tests"


def test_run_needs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failing = threading.Thread.start, [True]

    def refuse(thread: threading.Thread) -> None:
        if failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    running = executor(passing, workers=2)
    [trouble] = running.run([Job("a", TESTS, True)])
    assert isinstance(trouble, SandboxError) and "can't start new thread" in str(trouble)
    failing.clear()
    assert running.run([Job("a", TESTS, True)]) == [[PASSED]]
    failing.append(True)
    assert running.run([Job("b", TESTS, True)]) == [[PASSED]]  # by the existing thread
    running.close()


def test_run_tries_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "FIRST_PAUSE", 0.02)
    attempts: list[float] = []

    def sandbox(*_: Any, **__: Any) -> list[Outcome]:
        attempts.append(time.monotonic())
        if len(attempts) < 4:
            raise SandboxError("no processes")
        return [PASSED]

    assert found(sandbox, Limits(wall_seconds=10)) == [PASSED]
    assert [round((b - a) / 0.02) >= 2**n for n, (a, b) in enumerate(pairwise(attempts))] == [True] * 3
    attempts.clear()
    assert isinstance(found(sandbox, Limits(wall_seconds=0.01)), SandboxError)
    assert 1 <= len(attempts) <= 3


def test_run_makes_a_sandbox_again_after_a_failure() -> None:
    made, trouble = (passing, None), SandboxError("no process is left")
    make = Mock(side_effect=[made, trouble, trouble, made])
    running = Executor(make, Limits(wall_seconds=5), 1)
    running.close()
    assert running.run([Job("a", TESTS, True)]) == [[PASSED]]
    assert make.call_count == 4
    running.close()
    running = Executor(Mock(side_effect=chain([made], repeat(trouble))), SHORT, 1)
    running.close()
    assert running.run([Job("a", TESTS, True)]) == [trouble]


def test_run_gives_a_starving_program_the_time_limit() -> None:
    sandbox = Mock(side_effect=[StarvedError("too busy", [PASSED]), StarvedError("too busy", [])])
    tests = StreamTests(("",) * 3, ("",) * 3)
    assert found(sandbox, tests=tests) == [PASSED, TIME_LIMIT, NOT_RUN]
    assert sandbox.call_count == 2  # no more, because each attempt takes a minute


def test_run_tries_others_after_a_program_that_starves() -> None:
    attempts: Counter[str] = Counter()

    def sandbox(program: str, *_: Any, **__: Any) -> list[Outcome]:
        attempts[program] += 1
        if program.startswith("starving"):
            time.sleep(0.3)  # longer than other programs are tried again
            raise StarvedError("too busy", [])
        if attempts[program] == 1:
            raise SandboxError("killed")
        return [PASSED]

    programs = ["starving 1", "starving 2", "unlucky", "starving 3"]
    limits = Limits(wall_seconds=0.3)
    with closing(executor(sandbox, limits)) as running:
        found = running.run([Job(program, TESTS, True) for program in programs])
    assert found == [[TIME_LIMIT], [TIME_LIMIT], [PASSED], [TIME_LIMIT]]
    assert attempts == dict.fromkeys(programs, 2)


def test_run_judges_a_program_that_is_always_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "FIRST_PAUSE", 0.001)
    killed = [KilledError([PASSED, FAILED])] * KILLS
    sandbox = Mock(side_effect=killed)
    assert found(sandbox, Limits(), CALLS) == [PASSED, FAILED]
    assert [call.args[1] for call in sandbox.call_args_list] == [CALLS] * KILLS
    assert found(Mock(side_effect=[*killed[1:], [PASSED] * 2]), Limits(), CALLS) == [PASSED] * 2


def test_run_keeps_stream_tests_that_have_ended() -> None:
    sandbox = Mock(side_effect=[SandboxError("killed", [PASSED, FAILED]), [PASSED]])
    tests = StreamTests(("1", "2", "3"), ("", "", ""))
    assert found(sandbox, Limits(), tests) == [PASSED, FAILED, PASSED]
    assert [call.args[1].inputs for call in sandbox.call_args_list] == [("1", "2", "3"), ("3",)]


def test_run_in_many_threads_makes_one_sandbox() -> None:
    slowly = threading.Event()
    make = Mock(side_effect=lambda: (slowly.wait(0.05), (passing, None))[1])
    running = Executor(make, SHORT, 1)
    running.close()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(running.run, [[Job("a", TESTS, True)]] * 4)) == [[[PASSED]]] * 4
    assert make.call_count == 2
    running.close()


def test_closed_crew_takes_no_program() -> None:
    crew = _Crew(passing, None, SHORT, 1)
    crew.close()
    assert crew.submit(_Trial(Job("a", TESTS, True))).cancelled()


def test_close_gives_stopped_programs_no_verdict() -> None:
    sandbox = Waiting()
    running = executor(sandbox, stop=sandbox.ended.set)
    jobs, results = [Job("a", TESTS, True), Job("b", TESTS, True)], []
    thread = threading.Thread(target=lambda: results.extend(running.run(jobs)))
    thread.start()
    sandbox.started.wait(10)
    running.close()
    thread.join(10)
    assert results == [[PASSED], [PASSED]]  # tested again, because `run` waits for its outcome
    assert sandbox.programs[0] == "a" and sorted(sandbox.programs[1:]) == ["a", "b"]
    running.close()


def test_run_stops_its_programs_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Waiting()
    monkeypatch.setattr(executor_module.Future, "result", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        executor(sandbox, stop=sandbox.ended.set).run([Job("a", TESTS, True)])
    assert sandbox.ended.is_set()


def test_close_does_not_wait_for_a_hanging_sandbox() -> None:
    sandbox = Waiting()
    running = executor(sandbox)
    threading.Thread(target=lambda: running.run([Job("a", TESTS, True)]), daemon=True).start()
    sandbox.started.wait(10)
    begin = time.monotonic()
    running.close()
    assert time.monotonic() - begin < 3
    sandbox.ended.set()
