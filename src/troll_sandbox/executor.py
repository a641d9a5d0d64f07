"""Tests many programs, several at a time, and distinguishes failures of the machine from failures of a program.

All retries are made here. A sandbox makes one attempt, and raises a `SandboxError` if the attempt gives no verdict.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from troll_sandbox.cases import StreamTests, Tests, number_of
from troll_sandbox.errors import KilledError, SandboxError, StarvedError
from troll_sandbox.lifetime import at_end
from troll_sandbox.limits import NOT_RUN, TIME_LIMIT, Limits, Outcome

#: Seconds before the first retry. Each further retry waits twice as long, up to the longest pause.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0

#: A program that is killed this many times counts as the cause: it may be using all of the machine's memory.
KILLS = 4

#: After this many programs in a row that could not be tested, the waiting ones are not tried.
HOPELESS_PROGRAMS = 4

#: Seconds to wait until threads notice that their programs were killed.
CLOSE_SECONDS = 1.0


class Sandbox(Protocol):
    """The protocol of sandboxes: a function that tests a program where it can do no harm; several threads call it."""

    def __call__(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """Tests a program, in one attempt.

        Args:
            program: Python source, as a model wrote it.
            tests: Inputs or code of the tests, with the expected results.
            limits: The limits of the program.
            stop_at_failure: Whether the tests after the first failing one may be left out.

        Returns:
            An outcome per test; "not run" for those left out.

        Raises:
            SandboxError: The program could not be tested, for a reason outside the program. The executor tries again.
        """
        ...


class Job(NamedTuple):
    """A program, its tests, and whether testing stops at its first failure."""

    program: str
    tests: Tests
    stop_at_failure: bool


class Executor:
    """Tests programs in threads, and tries again if the machine failed.

    Programs that could not be tested are tried again after the others, with growing pauses, for `Limits.wall_seconds`:
    as long as another program may keep the machine busy. Finished tests by standard input keep their outcomes. Two
    failures become a verdict if they last:

    - A program that gets too little CPU time to end has the outcome "time limit": `while True` must not end a training
      run.
    - A program whose functions are tested, and that is killed `KILLS` times, counts as the cause.

    The sandbox is made now, and again when it is needed after `close` or after a fork.

    Args:
        make: Returns a sandbox, and a function that ends all its programs for good (None if nothing can end them).
            Raises `SandboxError` if no sandbox can be made.
        limits: The limits of each program.
        workers: The number of programs that run at a time.

    Raises:
        SandboxError: No sandbox can be made.
    """

    def __init__(
        self, make: Callable[[], tuple[Sandbox, Callable[[], object] | None]], limits: Limits, workers: int
    ) -> None:
        self._make, self._limits, self._workers = make, limits, workers
        self._opening = threading.Lock()
        self._open()

    def run(self, jobs: Sequence[Job]) -> list[list[Outcome] | SandboxError]:
        """Tests programs. An exception such as `KeyboardInterrupt` kills the running ones.

        Returns:
            For each program its outcomes, one per test, or the error of its last attempt.
        """
        trials = [_Trial(job) for job in jobs]
        self._try(trials, give_up=True)
        end, pause, chance = time.monotonic() + self._limits.wall_seconds, FIRST_PAUSE, random.Random(0)
        while failed := [trial for trial in trials if trial.error is not None]:
            pause = min(pause, end - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
            # One program probes whether anything can be tested. It is a random one, because a program that always
            # fails must not keep the others from being tested.
            probe = chance.choice(failed)
            self._try([probe])
            if probe.error is None or isinstance(probe.error, StarvedError):
                self._try([trial for trial in failed if trial is not probe])
            pause = min(2 * pause, LONGEST_PAUSE)
        return [trial.result() for trial in trials]

    def close(self) -> None:
        """Drops the waiting programs and stops the running ones, within about a second."""
        self._finalizer()

    def _open(self) -> None:
        self._crew = _Crew(*self._make(), self._limits, self._workers)
        self._process, self._finalizer = os.getpid(), at_end(self, self._crew.close)

    def _try(self, trials: Sequence[_Trial], give_up: bool = False) -> None:
        """Makes one attempt at each; with `give_up`, stops after `HOPELESS_PROGRAMS` failures in a row."""
        try:
            with self._opening:
                if self._process != os.getpid() or not self._finalizer.alive:
                    self._open()
                crew = self._crew
            running = [(trial, crew.submit(trial)) for trial in trials]
            failures: list[SandboxError] = []
            for trial, future in running:
                try:
                    future.result()
                except CancelledError:
                    trial.error = failures[-1] if failures else SandboxError("the sandbox was closed")
                    continue
                if trial.error is None:
                    failures.clear()
                elif not isinstance(trial.error, StarvedError):  # which says more about the program than the machine
                    failures.append(trial.error)
                if give_up and len(failures) == HOPELESS_PROGRAMS:
                    for _, waiting in running:
                        waiting.cancel()
        except SandboxError as error:
            for trial in trials:
                trial.error = error
        except BaseException:
            self.close()
            raise


@dataclass(eq=False)
class _Trial:
    """A program and the results of its attempts so far.

    Attributes:
        ended: Outcomes of the first tests; of all tests once `error` is None.
        error: Why the last attempt failed.
        kills: The number of attempts that were killed.
    """

    job: Job
    ended: list[Outcome] = field(default_factory=list)
    error: SandboxError | None = None
    kills: int = 0

    def attempt(self, sandbox: Sandbox, limits: Limits) -> None:
        program, tests, stop = self.job
        if isinstance(tests, StreamTests):
            start = len(self.ended)
            tests = replace(tests, inputs=tests.inputs[start:], outputs=tests.outputs[start:])
        try:
            found = sandbox(program, tests, limits=limits, stop_at_failure=stop)
            if len(found) != number_of(tests):
                raise SandboxError(f"the sandbox has {len(found)} outcomes for {number_of(tests)} tests")
            self.ended += found
            self.error = None
        except KilledError as error:
            self.kills += 1
            self.error = error if self.kills < KILLS else None
            self.ended += [] if self.error else error.outcomes
        except SandboxError as error:
            self.ended += error.ended
            self.error = error
        except BaseException as error:  # for example too many open files; no program may end a run
            self.error = SandboxError(f"a program could not be tested: {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def result(self) -> list[Outcome] | SandboxError:
        if isinstance(self.error, StarvedError):
            outcomes = [*self.ended, TIME_LIMIT]
            return outcomes + [NOT_RUN] * (number_of(self.job.tests) - len(outcomes))
        return self.error or self.ended


class _Crew:
    """Threads, started with the first programs.

    They are daemons, so a process that ends does not wait for a program. A sandbox ends with its thread.
    """

    def __init__(self, sandbox: Sandbox, stop: Callable[[], object] | None, limits: Limits, workers: int) -> None:
        self._sandbox, self._stop, self._limits, self._workers = sandbox, stop, limits, workers
        self._waiting = SimpleQueue[tuple[Future[None], _Trial] | None]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, trial: _Trial) -> Future[None]:
        """Queues an attempt, cancelled once this is closed.

        Raises:
            SandboxError: No thread runs, and none can be started.
        """
        future = Future[None]()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._work, name=f"troll-sandbox-{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError as error:  # for example no process is left in this container
                    if not self._threads:
                        raise SandboxError(f"programs cannot be run: {error}") from error
            self._waiting.put((future, trial))
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(Empty):
            while True:
                if (waiting := self._waiting.get_nowait()) is not None:
                    waiting[0].cancel()
        if self._stop is not None:
            self._stop()
        for _ in self._threads:
            self._waiting.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            future, trial = waiting
            if not future.set_running_or_notify_cancel():
                continue
            trial.attempt(self._unless_closed, self._limits)
            future.set_result(None)

    def _unless_closed(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """The sandbox's outcomes; none once it is closed, because `close` killed the program, which has not failed."""
        try:
            return self._sandbox(program, tests, limits=limits, stop_at_failure=stop_at_failure)
        finally:
            if self._closed:
                raise SandboxError("the sandbox was closed")
