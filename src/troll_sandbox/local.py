"""Tests programs on this machine: a sandbox for each program, and a judge for each thread that stays warm."""

from __future__ import annotations

import threading

from troll_sandbox.cases import StreamTests, Tests
from troll_sandbox.function_calls import Judge, JudgeEndedError, run_functions
from troll_sandbox.launch import Launcher
from troll_sandbox.limits import Limits, Outcome
from troll_sandbox.stream_runs import run_stdio


class LocalSandbox:
    """Tests programs by standard input and output, or by calling their functions; see `Sandbox`.

    Args:
        programs: Starts the sandboxes of programs.
        judges: Starts the sandboxes of judges, which call the functions; takes bubblewrap.
    """

    def __init__(self, programs: Launcher, judges: Launcher) -> None:
        self._programs, self._judged_in = programs, judges
        self._here = threading.local()
        self._judges: list[Judge] = []

    def __call__(self, program: str, tests: Tests, *, limits: Limits, stop_at_failure: bool) -> list[Outcome]:
        """Tests a program."""
        if isinstance(tests, StreamTests):
            return run_stdio(
                self._programs,
                program,
                tests.inputs,
                tests.outputs,
                limits,
                compare=tests.compare,
                stop_at_failure=stop_at_failure,
            )
        judge: Judge | None = getattr(self._here, "judge", None)
        if judge is None:
            judge = self._here.judge = Judge(self._judged_in)
            self._judges.append(judge)
        try:
            return run_functions(self._programs, judge, program, tests, limits, stop_at_failure=stop_at_failure)
        except JudgeEndedError:
            self._judges.remove(judge)
            judge.close()
            self._here.judge = None
            raise

    def close(self) -> None:
        """Kills programs and judges; running programs then have no outcome."""
        self._programs.stop()
        self._judged_in.stop()
        for judge in self._judges:
            judge.close()
