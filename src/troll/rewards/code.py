"""Rewards for programs: the tests of a task, run in a sandbox."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from troll.rewards.completion import Completion, completion_text
from troll.rewards.grading import Grader, Verdict
from troll.rewards.program import Tests, parse_tests, read_program
from troll.rewards.sandbox.bubblewrap import Sandbox
from troll.rewards.sandbox.limits import Limits, Outcome
from troll.rewards.sandbox.pool import Pool

Reward = Callable[..., list[float]]
_Batch = tuple[tuple[str, str, str], ...]


class CodeGrader(Grader):
    """Runs each completion's program against its tests: 1.0 where all are passed, and 0.0 otherwise.

    Every program gets a sandbox of its own, several run at a time, and equal programs with equal tests run once. What
    it decided last is kept: the reward of all tests and that of their fraction, asked one after the other for one
    batch, run its programs once.

    It can be pickled and survives a fork: the processes of a pool make their own sandboxes.

    Args:
        limits: Of each program; for tests by standard input and output, of each run.
        workers: How many programs run at a time; the CPU cores that this process may use by default.
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder.
        run_without_isolation: Run programs without a sandbox, as plain processes that can do whatever the user can.

    Raises:
        SandboxError: There can be no sandbox here; the message says what to install or to allow.
        ValueError: `workers` is below 1.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        workers: int | None = None,
        packages: Sequence[str | Path] = (),
        run_without_isolation: bool = False,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._limits = limits or Limits()
        self._workers = workers
        self._packages = [Path(folder) for folder in packages]
        self._isolated = not run_without_isolation
        self._start()

    def _start(self) -> None:
        sandbox = Sandbox(packages=self._packages, run_without_isolation=not self._isolated)
        self._process = os.getpid()
        self._last: tuple[_Batch, list[Verdict]] | None = None
        self._pool = Pool(sandbox, self._limits, self._workers or len(os.sched_getaffinity(0)))
        self._finalizer = weakref.finalize(self, Pool.close, self._pool)

    def grade(
        self,
        completions: Sequence[str],
        tests: Sequence[str] = (),
        prefix: Sequence[str | None] | None = None,
        **columns: Any,
    ) -> list[Verdict]:
        """Judges completions.

        Args:
            completions: B texts, as the model wrote them; `read_program` says where a program is in them.
            tests: B texts, each as `parse_tests` takes it.
            prefix: B texts that a completion may continue instead of repeating; None or empty where there is none.
            **columns: Unused; the data set's other columns.

        Returns:
            B verdicts. `score` is the share of the tests that are passed, `reason` why the first of the others is not.

        Raises:
            ValueError: `tests` does not fit; the message names the row.
            SandboxError: A sandbox could not be started.
        """
        if len(tests) != len(completions):
            raise ValueError(f"the column tests has {len(tests)} values for {len(completions)} completions")
        prefixes = [text or "" for text in prefix] if prefix is not None else [""] * len(completions)
        batch = tuple(zip(completions, tests, prefixes, strict=True))
        # After a fork, threads and judges are in the other process; after `close`, they are gone.
        if self._process != os.getpid() or not self._finalizer.alive:
            self._start()
        last = self._last
        if last is None or last[0] != batch:
            last = self._last = batch, self._verdicts(batch)
        return list(last[1])

    def close(self) -> None:
        """Ends the judges; the grader can be used again, and then starts new ones."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_limits", "_workers", "_packages", "_isolated")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _verdicts(self, batch: _Batch) -> list[Verdict]:
        cases: list[tuple[str | None, Tests]] = []
        for row, (completion, text, prefix) in enumerate(batch):
            try:
                tests = parse_tests(text)
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from None
            cases.append((read_program(completion, tests, prefix), tests))
        keys = [(program, text) for (program, _), (_, text, _) in zip(cases, batch, strict=True)]
        running = {
            key: self._pool.submit(key[0], tests)
            for key, (_, tests) in dict(zip(keys, cases, strict=True)).items()
            if key[0] is not None
        }
        try:
            return [
                _verdict(key[0], running[key].result()) if key in running else Verdict(0.0, None, "no program")
                for key in keys
            ]
        finally:
            for future in running.values():
                future.cancel()


def _verdict(program: str | None, outcomes: Sequence[Outcome]) -> Verdict:
    failures = [outcome.reason for outcome in outcomes if not outcome.passed]
    score = (len(outcomes) - len(failures)) / len(outcomes)
    return Verdict(score, program, failures[0] if failures else "correct")


def passed_fraction(grader: CodeGrader) -> Reward:
    """A reward in TRL's signature that is the share of passed tests instead of all or nothing.

    Beside the grader itself as another reward, it runs no program a second time.
    """

    def reward(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float]:
        verdicts = grader.grade([completion_text(completion) for completion in completions], **columns)
        return [verdict.score for verdict in verdicts]

    reward.__name__ = "passed_fraction"
    return reward


_making_default = threading.Lock()


@lru_cache(maxsize=1)
def _default_grader() -> CodeGrader:
    return CodeGrader()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Reward in verl's signature; may be called from several threads.

    Args:
        data_source: Unused; part of the signature.
        solution_str: The completion.
        ground_truth: The tests, as `parse_tests` takes them.
        extra_info: Of which `prefix`, if it is there, is what the completion may continue.
        partial: Whether the score is the share of passed tests instead of all or nothing.
        **kwargs: Unused; verl passes more in some configurations.

    Returns:
        `score`, which verl trains on, and what it logs: `acc` (all passed, 0.0 or 1.0) and `reason`.

    Raises:
        SandboxError: There can be no sandbox here; the message says what to install or to allow.
        ValueError: `ground_truth` is no tests.
    """
    prefix = (extra_info or {}).get("prefix")
    with _making_default:
        grader = _default_grader()
    [verdict] = grader.grade([solution_str], tests=[ground_truth], prefix=[prefix])
    success = float(verdict.success)
    return {"score": verdict.score if partial else success, "acc": success, "reason": verdict.reason}
