"""Programs tested on this machine, each in a sandbox of its own, with a judge per thread that stays warm."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from typing import Any

from troll.rewards.program import StreamTests, Tests
from troll.rewards.sandbox.bubblewrap import Bubblewrap, Process, SandboxError
from troll.rewards.sandbox.functions import JudgeEndedError, run_functions
from troll.rewards.sandbox.judge import Judge
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.stdio import run_stdio

#: How often a program is tested whose judge ends, by the system's lack of memory for one.
ATTEMPTS = 3


class SandboxClosedError(RuntimeError):
    """Nothing is started any more."""


class StoppableBubblewrap(Bubblewrap):
    """Bubblewrap's sandboxes, all of which can be killed at once."""

    def __init__(self, **options: Any) -> None:
        self._lock = threading.Lock()
        self._running = weakref.WeakSet[Process]()
        self._stopped = False
        super().__init__(**options)

    def start(self, *arguments: Any, **options: Any) -> Process:
        """As the parent's.

        Raises:
            SandboxClosedError: After `stop`.
        """
        self._refuse_if_stopped()
        process = super().start(*arguments, **options)
        with self._lock:
            self._running.add(process)
        try:
            self._refuse_if_stopped()  # as it may have been meanwhile
        except SandboxClosedError:
            process.end()
            raise
        return process

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise SandboxClosedError("the sandbox was closed")

    def stop(self) -> None:
        """Kills what runs, for the threads that started it to reap, and starts nothing more."""
        with self._lock:
            self._stopped = True
            running = [process for process in self._running if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class LocalSandbox:
    """Tests programs by standard input and output, or by calling their functions; see `protocol.Sandbox`.

    Args:
        sandbox: Where programs and judges run.
    """

    def __init__(self, sandbox: StoppableBubblewrap) -> None:
        self._sandbox = sandbox
        self._here = threading.local()
        self._judges: list[Judge] = []

    def __call__(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """Tests a program."""
        if isinstance(tests, StreamTests):
            return run_stdio(
                self._sandbox,
                program,
                tests.inputs,
                tests.outputs,
                limits,
                compare=tests.compare,
                stop_at_failure=stop_at_failure,
            )
        for _ in range(ATTEMPTS):
            try:
                return run_functions(
                    self._sandbox, self._judge(), program, tests, limits, stop_at_failure=stop_at_failure
                )
            except JudgeEndedError as error:
                cause = error
                self._here.judge.close()
                self._here.judge = None
        raise SandboxError(f"programs cannot be judged: {cause}") from cause

    def close(self) -> None:
        """Kills programs and judges; those that run have no outcome then."""
        self._sandbox.stop()
        for judge in self._judges:
            judge.close()

    def _judge(self) -> Judge:
        judge: Judge | None = getattr(self._here, "judge", None)
        if judge is None:
            judge = self._here.judge = Judge(self._sandbox)
            self._judges.append(judge)
        return judge
