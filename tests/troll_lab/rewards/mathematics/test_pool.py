import contextlib
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.troll_sandbox.processes import wait_until
from troll_lab.rewards import machine
from troll_lab.rewards.mathematics import pool as pool_module
from troll_lab.rewards.mathematics.pool import Comparison, ask

_QUESTIONS = [("9", rf"\frac{{{i}}}{{2}}") for i in range(14, 22)]
_RIGHT = [Comparison.DIFFERENT] * 4 + [Comparison.EQUAL] + [Comparison.DIFFERENT] * 3
_ENDLESS = ("9", "9^{9^{9^9}}")


#: The worker without math-verify, whose import takes a second at every start.
_STAND_IN = r"""
import importlib.util, os, re, signal, sys, time
from fractions import Fraction
from types import SimpleNamespace

def is_equal(gold, answer, positive_symbols):
    time.sleep(0.002)
    if answer == "kill":
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with its parent
    if answer == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if "^" in answer:
        return 9 ** 9 ** 9 ** 9 == int(gold)  # one long operation, during which Python handles no signal
    return Fraction(*map(int, re.findall(r"\d+", answer))) == int(gold)

spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
sys.modules[worker.EXPRESSIONS] = SimpleNamespace(is_equal=is_equal, forbid_code=lambda: None)
worker._FIRST_QUESTIONS = []
if len(sys.argv) > 2:
    worker._REPLACED_FROM_KILOBYTES = int(sys.argv[2])
worker.main()
"""
_start_math_verify = pool_module._start


def _start_stand_in(*settings):
    command = [sys.executable, "-c", _STAND_IN, pool_module.worker.__file__, *settings]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


@pytest.fixture(scope="module")
def one_pool():
    pool = pool_module._Pool(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_pool", pool)
        patch.setattr(pool_module, "_start", _start_stand_in)
        yield pool
    pool.stop()


@pytest.fixture
def pool(one_pool):
    """One for all tests, with its processes. A test may leave it stopped, never busy."""
    assert _is_right()
    yield one_pool
    assert _is_right()


def _processes(pool):
    return [process._process.pid for process in pool._processes if process._process is not None]


def _family(pids):
    """The processes with one of these numbers or parents that are not zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z" and (int(parent) in pids or int(stat.parent.name) in pids):
                found.add(int(stat.parent.name))
    return found


def _has_children(pids):
    return len(_family(pids)) == 2 * len(pids)


def _is_right():
    return ask(_QUESTIONS, 2.0) == _RIGHT


def test_pool_starts_processes_as_they_are_needed(pool):
    pool.stop()
    assert _processes(pool) == []
    assert ask(_QUESTIONS[:1], 2.0) == _RIGHT[:1]
    assert len(_processes(pool)) == 1
    assert _is_right()
    assert len(_processes(pool)) == 2


def test_thread_with_signals_blocked_or_ignored_may_ask(pool):
    # As a data loader's or a server's threads have them: a worker that is started from there inherits that.
    pool.stop()
    answers = []

    def grade():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGPROF, signal.SIGCHLD])
        answers.extend(ask([_ENDLESS, *_QUESTIONS], 0.2))

    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGPROF, signal.SIGALRM)}
    try:
        thread = threading.Thread(target=grade)
        thread.start()
        thread.join()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert answers == [Comparison.TIME_LIMIT, *_RIGHT]


def _grade_into(connection, pids):
    answers = [each.value for each in ask([_ENDLESS, *_QUESTIONS], 0.2)]
    own = not set(_processes(pool_module._the_pool())) & set(pids)
    connection.send((answers, own, multiprocessing.current_process().daemon))


def test_forked_daemon_amid_a_comparison_has_its_own_pool(pool):
    before = _processes(pool)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_grade_into, args=(sender, before), daemon=True)
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(ask, [_ENDLESS] * 2, 0.5)
        wait_until(lambda: pool._idle.empty())
        process.start()
        assert endless.result() == [Comparison.TIME_LIMIT] * 2
    assert receiver.poll(60)
    assert receiver.recv() == (["time limit", *(comparison.value for comparison in _RIGHT)], True, True)
    process.join()
    assert _processes(pool) == before


def test_killed_workers_are_replaced(pool):
    children = _family(_processes(pool)) - set(_processes(pool))
    assert children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not children & _family(_processes(pool)))  # a dying one may still take a question
    assert _is_right()
    for pid in _processes(pool):  # its child serves on
        os.kill(pid, signal.SIGKILL)
    assert _is_right()
    pool.stop()


def test_question_is_asked_three_times_of_killed_workers(pool, monkeypatch):
    starts = Mock(side_effect=_start_stand_in)
    monkeypatch.setattr(pool_module, "_start", starts)
    pool.stop()
    assert ask([("9", "kill")], 2.0) == [Comparison.KILLED]
    assert starts.call_count == 3


def test_crash_is_no_time_limit(pool):
    assert ask([("9", "crash"), *_QUESTIONS], 2.0) == [Comparison.FAILED, *_RIGHT]


def test_stopped_worker_is_given_up(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(pool_module, "_PATIENCE_FACTOR", 0.0)
    for pid in _family(_processes(pool)):
        os.kill(pid, signal.SIGSTOP)
    assert ask(_QUESTIONS[:2], 2.0) == [Comparison.SILENT] * 2


def test_interrupt_leaves_no_verdict_behind(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ask([("4", "2 + 2"), ("5", "2 + 3")], 2.0)


def test_compare_raises_only_if_the_first_import_fails(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(pool_module, "_start", _start_math_verify)
    (tmp_path / "math_verify.py").write_text("import a_package_that_is_missing")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    broken = pool_module._Pool(2)
    with pytest.raises(RuntimeError, match=r"cannot be imported; .* -c 'import troll_lab\S+expressions' says why"):
        broken.compare(_QUESTIONS, 2.0)
    assert _processes(broken) == []
    pool.stop()  # of processes that have worked before, it is the machine's trouble
    monkeypatch.setattr(pool_module, "_STARTING_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "_PAUSE_SECONDS", 0.0)
    assert ask(_QUESTIONS[:2], 2.0) == [Comparison.NOT_STARTED] * 2
    late = pool_module._Pool(2)  # a process whose first start is late
    late._processes[0]._imported.set()
    assert late.compare(_QUESTIONS[:1], 2.0) == [Comparison.NOT_STARTED]


#: No process can be started.
_NO_START = Mock(side_effect=BlockingIOError("Resource temporarily unavailable"))


def test_machine_without_processes_is_tried_again(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_PAUSE_SECONDS", 0.01)
    pool.stop()
    failures = iter([_NO_START] * 5)
    monkeypatch.setattr(pool_module, "_start", lambda: next(failures, _start_stand_in)())
    assert _is_right()
    pool.stop()
    monkeypatch.setattr(pool_module, "_start", _NO_START)
    monkeypatch.setattr(pool_module, "_STARTING_SECONDS", 0.1)
    assert ask(_QUESTIONS, 2.0) == [Comparison.NOT_STARTED] * len(_QUESTIONS)


def test_process_that_cannot_start_leaves_questions_to_others(pool, monkeypatch):
    pool.stop()
    assert ask(_QUESTIONS[:1], 2.0) == _RIGHT[:1]
    assert len(_processes(pool)) == 1
    monkeypatch.setattr(pool_module, "_start", _NO_START)
    monkeypatch.setattr(pool_module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pool_module, "_STARTING_SECONDS", 0.05)
    assert ask(_QUESTIONS * 8, 2.0) == _RIGHT * 8
    assert len(_processes(pool)) == 1


@pytest.mark.parametrize(("memory", "size"), [(64 << 30, 8), (5 << 29, 2)])
def test_pool_has_a_process_a_gibibyte_and_at_most_8(monkeypatch, memory, size):
    monkeypatch.setattr(machine, "cores", lambda root: 12)
    monkeypatch.setattr(machine, "memory_limit", lambda root: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert pool_module._size() == size


@pytest.mark.slow
def test_stop_leaves_no_process_and_no_descriptor(pool):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def zombies():
        command = ["ps", "-o", "stat=", "--ppid", str(os.getpid())]
        return subprocess.run(command, capture_output=True, text=True).stdout.count("Z")

    pool.stop()
    before, zombies_before = descriptors(), zombies()
    for _ in range(2):
        assert ask([_ENDLESS] * 6, 0.1) == [Comparison.TIME_LIMIT] * 6
        pids = set(_processes(pool))
        wait_until(functools.partial(_has_children, pids))
        pool.stop()
        assert _family(pids) == set()
        assert descriptors() == before
    assert zombies() == zombies_before


_TRAINER = """
import json, os, sys, time
from troll_lab.rewards.mathematics import pool, success
assert success.grade([r"\\boxed{18}", "18"], answer=["18"] * 2)[0].success
assert not {"sympy", "math_verify"} & set(sys.modules) and pool._pool is None
pool.ask([("9", r"\\frac{18}{2}")] * 2, 2.0)
loader = os.fork()  # holds on to the pipes
if loader == 0:
    time.sleep(60)
    os._exit(0)
print(json.dumps([loader, [p._process.pid for p in pool._pool._processes if p._process]]), flush=True)
time.sleep(60)
"""


def test_workers_start_late_and_die_with_the_asking_process():
    with subprocess.Popen([sys.executable, "-c", _TRAINER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        loader, pids = json.loads(trainer.stdout.readline())
        try:
            assert pids
            assert _has_children(pids)
            trainer.kill()
            wait_until(lambda: not _family(pids))
        finally:
            os.kill(loader, signal.SIGKILL)


@pytest.mark.slow
def test_memory_of_a_comparison_is_bounded(pool, monkeypatch):
    pool.stop()
    monkeypatch.setattr(pool_module, "_start", _start_math_verify)
    assert _is_right()
    peak = 0
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, [("1", rf"({'7' * 900})^{{{10**k}}}") for k in range(4, 10)], 0.5)
        while not asked.done():
            for pid in _family(_processes(pool)):
                with contextlib.suppress(OSError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
                    peak = max(peak, pages * os.sysconf("SC_PAGE_SIZE"))
            time.sleep(0.005)
    assert Comparison.EQUAL not in asked.result()
    assert 0 < peak <= 1 << 30


@pytest.mark.slow
def test_child_that_took_much_memory_is_replaced(pool, monkeypatch):
    def has_grown(before):
        seen.update(_family(_processes(pool)) - set(_processes(pool)))
        return len(seen) > before

    pool.stop()
    monkeypatch.setattr(pool_module, "_start", lambda: _start_stand_in("0"))
    seen: set[int] = set()
    for _ in range(5):
        assert ask(_QUESTIONS[4:5], 2.0) == [Comparison.EQUAL]
        wait_until(functools.partial(has_grown, len(seen)))
    assert len(seen) >= 5
    pool.stop()
