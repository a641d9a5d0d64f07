"""Several programs at a time, in threads that keep no process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from troll.rewards.program import Tests
from troll.rewards.sandbox.launch import SandboxError
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.protocol import Sandbox, number_of

#: How long threads whose programs were killed may take to notice.
END_SECONDS = 1.0


class Pool:
    """Tests programs in threads, which start with the first programs.

    They are daemons: at the end of the process nobody waits for a program, and the sandboxes that a thread has started
    end with it.

    Args:
        sandbox: Where programs are tested.
        limits: What each program may use.
        workers: How many programs run at a time.
        stop: Ends programs that run; None where nothing can.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, workers: int, stop: Callable[[], None] | None = None) -> None:
        self._sandbox, self._limits, self._workers, self._stop = sandbox, limits, workers, stop
        self._jobs = SimpleQueue[tuple[Future[list[Outcome]], str, Tests, bool] | None]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, program: str, tests: Tests, stop_at_failure: bool) -> Future[list[Outcome]]:
        """Has a program tested; the result is an outcome per test, or raises `SandboxError`.

        Raises:
            SandboxError: No thread could be started.
        """
        with self._lock:
            if len(self._threads) < self._workers:
                self._start_thread()
        future = Future[list[Outcome]]()
        self._jobs.put((future, program, tests, stop_at_failure))
        return future

    def close(self) -> None:
        """Drops the programs that wait and stops those that run, in about a second."""
        self._closed = True
        try:
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        except Empty:
            pass
        if self._stop is not None:
            self._stop()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"troll-sandbox-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no process is left in this container, for one
            if not self._threads:
                raise SandboxError(f"programs cannot be run: {error}") from error
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, program, tests, stop_at_failure = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                outcomes = self._sandbox(program, tests, limits=self._limits, stop_at_failure=stop_at_failure)
                if len(outcomes) != number_of(tests):
                    raise SandboxError(f"the sandbox has {len(outcomes)} outcomes for {number_of(tests)} tests")
                if self._closed:  # what was killed on the way has not failed
                    raise SandboxError("the sandbox was closed")
                future.set_result(outcomes)
            except SandboxError as error:
                future.set_exception(error)
            except BaseException as error:  # no file can be opened, for one; no program may end a run
                trouble = SandboxError(f"a program could not be tested: {type(error).__name__}: {error}")
                trouble.__cause__ = error
                future.set_exception(trouble)
