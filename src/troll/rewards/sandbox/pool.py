"""Several programs at a time, each in a sandbox of its own, with a judge per thread that stays warm."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from troll.rewards.program import StreamTests, Tests
from troll.rewards.sandbox.bubblewrap import Sandbox, SandboxError
from troll.rewards.sandbox.functions import JudgeEndedError, run_functions
from troll.rewards.sandbox.judge import Judge
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.stdio import run_stdio


class Pool:
    """Tests programs in threads; the first of them starts with the first program.

    Args:
        sandbox: Where programs and judges run.
        limits: Of each program; for tests by standard input and output, of each run.
        workers: How many programs run at a time.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, workers: int) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="troll-sandbox")
        self._here = threading.local()
        self._judges: list[Judge] = []
        self._process = os.getpid()

    def submit(self, program: str, tests: Tests) -> Future[list[Outcome]]:
        """Has a program tested; the result is an outcome per test, or raises `SandboxError`."""
        return self._executor.submit(self._outcomes, program, tests)

    def close(self) -> None:
        """Waits for the programs that run, drops those that wait, and ends the judges; nothing in a forked process."""
        if self._process != os.getpid():
            return
        self._executor.shutdown(cancel_futures=True)
        for judge in self._judges:
            judge.close()

    def _outcomes(self, program: str, tests: Tests) -> list[Outcome]:
        if isinstance(tests, StreamTests):
            return run_stdio(self._sandbox, program, tests.inputs, tests.outputs, self._limits)
        try:
            return run_functions(self._sandbox, self._judge(), program, tests, self._limits)
        except JudgeEndedError:  # by the system's lack of memory, for one
            self._here.judge.close()
            self._here.judge = None
            try:
                return run_functions(self._sandbox, self._judge(), program, tests, self._limits)
            except JudgeEndedError as error:
                raise SandboxError(f"programs cannot be judged: {error}") from error

    def _judge(self) -> Judge:
        judge: Judge | None = getattr(self._here, "judge", None)
        if judge is None:
            judge = self._here.judge = Judge(self._sandbox)
            self._judges.append(judge)
        return judge
