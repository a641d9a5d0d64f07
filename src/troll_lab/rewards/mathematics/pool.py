"""The pool of processes that compare answers; this is the side of the training process."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache
from typing import IO

from troll_lab.rewards.machine import processes
from troll_lab.rewards.mathematics import worker

_MOST_PROCESSES = 8

# The limit is on CPU time. Wall time bounds processes that get no CPU time: stopped ones, and any on a busy machine.
_PATIENCE_SECONDS = 120.0
_PATIENCE_FACTOR = 30.0
# If a process cannot be started for lack of memory or processes, it is tried again.
_STARTING_SECONDS = 30.0
_PAUSE_SECONDS = 0.5
_ATTEMPTS = 3


class Comparison(Enum):
    """The result of one comparison; its value is the reason for a verdict, in words."""

    EQUAL = "correct"
    DIFFERENT = "wrong answer"
    TIME_LIMIT = "time limit"
    FAILED = "cannot be compared"
    KILLED = "unscored: the process of math-verify was killed again and again"
    SILENT = "unscored: the process of math-verify was given no time by the machine"
    NOT_STARTED = "unscored: the process of math-verify could not be started, for lack of memory or processes"

    @property
    def score(self) -> float | None:
        """1.0 for equal answers, else 0.0; None if the machine failed before a verdict."""
        failed = (Comparison.KILLED, Comparison.SILENT, Comparison.NOT_STARTED)
        return None if self in failed else float(self is Comparison.EQUAL)


_COMPARISONS = {
    worker.DIFFERENT: Comparison.DIFFERENT,
    worker.EQUAL: Comparison.EQUAL,
    worker.TIME_LIMIT: Comparison.TIME_LIMIT,
    worker.FAILED: Comparison.FAILED,
}


def ask(questions: Sequence[tuple[str, str]], cpu_seconds: float, positive_symbols: bool = False) -> list[Comparison]:
    """Compares N pairs of a gold answer and an answer, in processes that are kept for the next call.

    Raises:
        RuntimeError: If math-verify is installed, but cannot be imported.
    """
    return _the_pool().compare(questions, cpu_seconds, positive_symbols)


class _Pool:
    """Processes that wait for questions. Any number of threads may ask; a question occupies one process."""

    def __init__(self, size: int):
        imported = threading.Event()  # set once a process of the pool has imported math-verify
        self._processes = [_Process(imported) for _ in range(size)]
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def compare(
        self, questions: Sequence[tuple[str, str]], cpu_seconds: float, positive_symbols: bool = False
    ) -> list[Comparison]:
        """Asks as many processes at a time as are idle, at least one."""
        processes = [self._idle.get()]
        with contextlib.suppress(queue.Empty):
            while len(processes) < min(len(questions), len(self._processes)):
                processes.append(self._idle.get_nowait())
        try:
            return self._divide(questions, processes, (cpu_seconds, positive_symbols))
        finally:
            for process in processes:
                if process.is_busy:  # after an exception, its verdict is not read
                    process.stop()
                self._idle.put(process)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stop()

    def abandon(self) -> None:
        """Drops the processes after a fork: they belong to the process from which this one was forked."""
        for process in self._processes:
            process.abandon()

    def _divide(
        self, questions: Sequence[tuple[str, str]], processes: Sequence[_Process], how: tuple[float, bool]
    ) -> list[Comparison]:
        """Gives each idle process the next question, until all are answered."""
        comparisons: dict[int, Comparison] = {}
        unasked = list(reversed(range(len(questions))))
        asked: dict[_Process, int] = {}
        idle = list(processes)
        while len(comparisons) < len(questions):
            while unasked and idle:
                process = idle.pop()
                asked[process] = unasked.pop()
                process.ask(questions[asked[process]], *how)
            ready, overdue = _wait(asked)
            for process in ready + overdue:
                comparison = process.verdict() if process in ready else process.give_up()
                if comparison is None:
                    continue
                index = asked.pop(process)
                if comparison is Comparison.NOT_STARTED and (asked or idle):  # the others continue without it
                    unasked.append(index)
                else:
                    comparisons[index] = comparison
                    idle.append(process)
        return [comparisons[index] for index in range(len(questions))]


def _wait(processes: Iterable[_Process]) -> tuple[list[_Process], list[_Process]]:
    """Waits for processes that answer or have to be started again; also returns those that are silent for too long."""
    missing = [process for process in processes if process.verdicts is None]
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if process.verdicts is not None:
                selector.register(process.verdicts, selectors.EVENT_READ, process)
        timeout = min((process.start_at - time.monotonic() for process in missing), default=1.0)
        ready = [key.data for key, _ in selector.select(max(0.0, timeout))]
    now = time.monotonic()
    ready += [process for process in missing if process.start_at <= now]
    return ready, [process for process in processes if process.deadline < now and process not in ready]


class _Process:
    """One process (see `worker.py`), started at its first question and again whenever it has ended."""

    def __init__(self, imported: threading.Event) -> None:
        self._imported = imported
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._fails_since: float | None = None
        self.start_at = 0.0  # of the monotonic clock: when to try to start it again
        self._question: tuple[tuple[str, str], float, bool] | None = None
        self._attempts = 0
        self._number = 0
        self.deadline = 0.0  # when to stop waiting for its verdict

    @property
    def is_busy(self) -> bool:
        return self._question is not None

    @property
    def verdicts(self) -> IO[bytes] | None:
        return None if self._process is None else self._process.stdout

    def ask(self, question: tuple[str, str], cpu_seconds: float, positive_symbols: bool) -> None:
        self._question, self._attempts = (question, cpu_seconds, positive_symbols), 0
        self._send()

    def verdict(self) -> Comparison | None:
        """Reads the process's answer: the comparison, or None if it is still to come."""
        if self.verdicts is None:
            if self._fails_for_long:
                self._question = None
                return Comparison.NOT_STARTED
            self._send()
            return None
        record = self.verdicts.read(worker.VERDICT.size)
        if not record:
            return self._ended()
        number, code = worker.VERDICT.unpack(record)
        if number == worker.READY:
            self._imported.set()
            self._is_ready, self._fails_since = True, None
        if number != self._number:
            return None
        self._question = None
        return _COMPARISONS[code]

    def give_up(self) -> Comparison:
        self.stop()
        return Comparison.SILENT

    def stop(self) -> int | None:
        """Ends the process, and returns its exit status."""
        if self._process is None:
            self._question = None
            return None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # ends an idle process, which reaps its child
        try:
            status = self._process.wait(timeout=0 if self.is_busy else 2)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            status = self._process.wait()
        self._process.stdout.close()
        self._process, self._question, self._is_ready = None, None, False
        return status

    def abandon(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.returncode = 0  # not a child of this process, which must not wait for it
        self._process, self._question = None, None

    @property
    def _fails_for_long(self) -> bool:
        return self._fails_since is not None and time.monotonic() - self._fails_since > _STARTING_SECONDS

    def _send(self) -> None:
        assert self._question is not None
        (gold, answer), cpu_seconds, positive_symbols = self._question
        self.deadline = time.monotonic() + _PATIENCE_SECONDS + _PATIENCE_FACTOR * cpu_seconds
        if self._process is None:
            try:
                self._process = _start()
            except OSError:
                self._start_later()
                return
        assert self._process.stdin is not None
        self._number += 1
        self._attempts += 1
        texts = [text.encode("utf-8", "surrogatepass") for text in (gold, answer)]
        header = worker.QUESTION.pack(self._number, cpu_seconds, positive_symbols, *map(len, texts))
        with contextlib.suppress(BrokenPipeError):  # then the other pipe has ended too, which `verdict` sees
            self._process.stdin.write(header + b"".join(texts))

    def _start_later(self) -> None:
        now = time.monotonic()
        self._fails_since = self._fails_since or now
        self.start_at = now if self._fails_for_long else now + _PAUSE_SECONDS

    def _ended(self) -> Comparison | None:
        """Asks again if the process was killed or could not be started: the answer did not cause that."""
        was_ready, question = self._is_ready, self._question
        status = self.stop()
        if was_ready and self._attempts >= _ATTEMPTS:
            return Comparison.KILLED
        if status == worker.CANNOT_IMPORT and not self._imported.is_set():
            command = f"{sys.executable} -c 'import {worker.EXPRESSIONS}'"
            raise RuntimeError(f"math-verify is installed but cannot be imported; {command} says why")
        self._question = question
        if was_ready:
            self._send()
        else:
            self._start_later()
        return None


def _start() -> subprocess.Popen[bytes]:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}  # sympy orders by hash in places
    return subprocess.Popen(
        [sys.executable, worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # interrupts from the terminal do not reach it, and it is killed with its child
        env={**os.environ, **environment},
    )


def _size() -> int:
    return min(_MOST_PROCESSES, processes(worker.MEMORY_BYTES))


_pool: _Pool | None = None
_making = threading.Lock()


def _the_pool() -> _Pool:
    """The pool of this process, which is made for its first question."""
    global _pool
    _watch_forks_and_the_end()
    with _making:
        if _pool is None:
            _pool = _Pool(_size())
        return _pool


@cache
def _watch_forks_and_the_end() -> None:
    os.register_at_fork(after_in_child=_abandon)
    atexit.register(_stop)


def _abandon() -> None:
    global _pool, _making
    if _pool is not None:
        _pool.abandon()
    _pool, _making = None, threading.Lock()  # another thread may have held the lock


def _stop() -> None:
    if _pool is not None:
        _pool.stop()
