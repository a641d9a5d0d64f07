"""The processes that compare answers, as the process that trains sees them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import IO

from troll.rewards import equivalence_worker
from troll.rewards.equivalence_worker import DIFFERENT, EQUAL, FAILED, QUESTION, READY, TIME_LIMIT, VERDICT

_MOST_WORKERS = 8

# CPU time decides. Wall time ends what the kernel cannot: a process that was stopped, or a machine on its knees.
_PATIENCE_SECONDS = 120.0
_PATIENCE_FACTOR = 30.0


class Comparison(Enum):
    """What became of one comparison; the value says it in words, as the reason of a verdict."""

    EQUAL = "correct"
    DIFFERENT = "wrong answer"
    TIME_LIMIT = "time limit"
    FAILED = "cannot be compared"


_COMPARISONS = {
    DIFFERENT: Comparison.DIFFERENT,
    EQUAL: Comparison.EQUAL,
    TIME_LIMIT: Comparison.TIME_LIMIT,
    FAILED: Comparison.FAILED,
}


def ask(questions: Sequence[tuple[str, str]], cpu_seconds: float) -> list[Comparison]:
    """Compares N pairs of a gold answer and an answer, in processes that live on for the next call.

    Raises:
        RuntimeError: If a process cannot be started.
    """
    return _pool.compare(questions, cpu_seconds)


class _Pool:
    """Processes that wait for questions. Any number of threads may ask; a question occupies one process."""

    def __init__(self, size: int):
        self._workers = [_Worker() for _ in range(size)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def compare(self, questions: Sequence[tuple[str, str]], cpu_seconds: float) -> list[Comparison]:
        """Asks as many processes at a time as are idle, at least one."""
        workers = self._borrow(len(questions))
        try:
            return self._ask(workers, questions, cpu_seconds)
        finally:
            for worker in workers:
                if worker.is_busy:  # after an exception: nobody waits for its verdict any more
                    worker.stop()
                self._idle.put(worker)

    def stop(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.stop()

    def abandon(self) -> None:
        """Forgets the processes, which are those of the process that this one was forked from."""
        for worker in self._workers:
            worker.abandon()

    def _borrow(self, wanted: int) -> list[_Worker]:
        workers = [self._idle.get()]
        while len(workers) < min(wanted, len(self._workers)):
            try:
                workers.append(self._idle.get_nowait())
            except queue.Empty:
                break
        return workers

    def _ask(
        self, workers: Sequence[_Worker], questions: Sequence[tuple[str, str]], cpu_seconds: float
    ) -> list[Comparison]:
        comparisons: dict[int, Comparison] = {}
        unasked = iter(enumerate(questions))
        asked: dict[_Worker, int] = {}
        idle = list(workers)
        while len(comparisons) < len(questions):
            for index, question in itertools.islice(unasked, len(idle)):
                worker = idle.pop()
                worker.ask(question, cpu_seconds)
                asked[worker] = index
            ready, overdue = _wait(asked)
            for worker in ready + overdue:
                comparison = worker.verdict() if worker in ready else worker.give_up()
                if comparison is not None:
                    comparisons[asked.pop(worker)] = comparison
                    idle.append(worker)
        return [comparisons[index] for index in range(len(questions))]


def _wait(workers: Iterable[_Worker]) -> tuple[list[_Worker], list[_Worker]]:
    """The workers that have something to say, and those that have been silent for too long."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.verdicts, selectors.EVENT_READ, worker)
        ready = [key.data for key, _ in selector.select(timeout=1.0)]
    return ready, [worker for worker in workers if worker.is_overdue and worker not in ready]


class _Worker:
    """One process (see `equivalence_worker.py`), started at its first question and again whenever it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._question: tuple[tuple[str, str], float] | None = None
        self._attempts = 0
        self._number = 0
        self._deadline = 0.0

    @property
    def is_busy(self) -> bool:
        return self._question is not None

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    @property
    def verdicts(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def ask(self, question: tuple[str, str], cpu_seconds: float) -> None:
        self._question, self._attempts = (question, cpu_seconds), 0
        self._send()

    def verdict(self) -> Comparison | None:
        """Reads what the process says: the comparison, or None where it is still to come."""
        record = self.verdicts.read(VERDICT.size)
        if not record:
            return self._ended()
        number, code = VERDICT.unpack(record)
        if number == READY:
            self._is_ready = True
        if number != self._number:
            return None
        self._question = None
        return _COMPARISONS[code]

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends an idle one, and reaps its child
        try:
            self._process.wait(timeout=0 if self.is_busy else 2)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.verdicts.close()
        self._process, self._question = None, None

    def abandon(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.returncode = 0  # it is no child of this process, and not to be waited for
        self._process, self._question = None, None

    def _send(self) -> None:
        assert self._question is not None
        (gold, answer), cpu_seconds = self._question
        if self._process is None:
            self._process, self._is_ready = _start(), False
        assert self._process.stdin is not None
        self._number += 1
        self._attempts += 1
        self._deadline = time.monotonic() + _PATIENCE_SECONDS + _PATIENCE_FACTOR * cpu_seconds
        texts = [text.encode("utf-8", "surrogatepass") for text in (gold, answer)]
        header = QUESTION.pack(self._number, cpu_seconds, *map(len, texts))
        with contextlib.suppress(BrokenPipeError):  # then the other pipe is at its end, which `verdict` sees
            self._process.stdin.write(header + b"".join(texts))

    def _ended(self) -> Comparison | None:
        """Tries once more, where the process was ended from outside while it was idle or at work."""
        was_ready, attempts = self._is_ready, self._attempts
        question = self._question
        self.stop()
        if not was_ready:
            raise RuntimeError(
                "the process of math-verify ended before it was ready; "
                f"{sys.executable} -c 'import math_verify' may say why"
            )
        if attempts > 1:
            return Comparison.FAILED
        self._question = question
        self._send()
        return None

    def give_up(self) -> Comparison:
        was_ready = self._is_ready
        self.stop()
        if not was_ready:
            raise RuntimeError(f"the process of math-verify was not ready after {_PATIENCE_SECONDS} s")
        return Comparison.TIME_LIMIT


def _start() -> subprocess.Popen[bytes]:
    # Run by its path from a command line of its own: as a script it would find `troll/rewards/math.py` under the name
    # of Python's `math`, and as a module it would import torch.
    code = (
        "import json, runpy, sys; sys.path = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([str(entry) for entry in sys.path]), equivalence_worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # an interrupt from the terminal is not for it, and it is killed with its child
        env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy orders by hash in places
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pool = _Pool(min(_MOST_WORKERS, _processors()))


def _renew() -> None:
    global _pool
    _pool.abandon()
    _pool = _Pool(min(_MOST_WORKERS, _processors()))


os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: _pool.stop())
