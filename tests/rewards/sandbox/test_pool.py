import threading
import time
from contextlib import closing

import pytest

from troll.rewards.program import StreamTests
from troll.rewards.sandbox.launch import SandboxError
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.pool import Pool

TESTS = StreamTests(("",), ("",))
PASSED = [Outcome(True, "passed")]


def test_programs_are_tested_as_asked_for():
    calls = []

    def sandbox(program, tests, *, limits, stop_at_failure):
        calls.append((program, tests, limits, stop_at_failure))
        return PASSED

    limits = Limits(cpu_seconds=1.0)
    with closing(Pool(sandbox, limits, workers=1)) as pool:
        assert [pool.submit("a", TESTS, True).result(), pool.submit("b", TESTS, False).result()] == [PASSED, PASSED]
    assert calls == [("a", TESTS, limits, True), ("b", TESTS, limits, False)]


def test_as_many_at_a_time_as_there_are_workers():
    together = threading.Barrier(3)

    def sandbox(program, tests, **_):
        together.wait(10)
        return PASSED

    with closing(Pool(sandbox, Limits(), workers=3)) as pool:
        assert [future.result() for future in [pool.submit(str(n), TESTS, True) for n in range(6)]] == [PASSED] * 6


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SandboxError("no namespaces"), "^no namespaces$"),
        (OSError(24, "Too many open files"), "could not be tested: OSError: .*Too many open files"),
        (MemoryError(), "could not be tested: MemoryError"),
        (KeyError("mine"), "could not be tested: KeyError: 'mine'"),
    ],
)
def test_anything_but_an_outcome_is_trouble(error, message):
    def sandbox(*_, **__):
        raise error

    with closing(Pool(sandbox, Limits(), workers=1)) as pool, pytest.raises(SandboxError, match=message) as caught:
        pool.submit("a", TESTS, True).result()
    assert error in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("outcomes", [[], PASSED * 2])
def test_nothing_is_passed_without_an_outcome_for_every_test(outcomes):
    with (
        closing(Pool(lambda *_, **__: outcomes, Limits(), workers=1)) as pool,
        pytest.raises(SandboxError, match=f"the sandbox has {len(outcomes)} outcomes for 1 tests"),
    ):
        pool.submit("a", TESTS, True).result()


def test_without_a_thread_there_is_no_verdict(monkeypatch):
    start, failing = threading.Thread.start, [True]

    def refuse(thread):
        if failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = Pool(lambda *_, **__: PASSED, Limits(), workers=2)
    with pytest.raises(SandboxError, match="can't start new thread"):
        pool.submit("a", TESTS, True)
    failing.clear()
    assert pool.submit("a", TESTS, True).result() == PASSED
    failing.append(True)
    assert pool.submit("b", TESTS, True).result() == PASSED  # by the thread that there is
    pool.close()


def test_what_is_stopped_on_the_way_has_not_failed():
    started, stopped = threading.Event(), threading.Event()

    def sandbox(program, *_, **__):
        started.set()
        stopped.wait(10)
        return [Outcome(False, "the sandbox ended early")]

    pool = Pool(sandbox, Limits(), workers=1, stop=stopped.set)
    running, waiting = pool.submit("a", TESTS, True), pool.submit("b", TESTS, True)
    started.wait(10)
    pool.close()
    assert waiting.cancelled()
    with pytest.raises(SandboxError, match="closed"):
        running.result(10)


def test_closing_waits_for_no_sandbox_that_does_not_stop():
    end = threading.Event()

    def sandbox(*_, **__):
        end.wait(30)
        return PASSED

    pool = Pool(sandbox, Limits(), workers=1)
    pool.submit("a", TESTS, True)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 3
    end.set()
