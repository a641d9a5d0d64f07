"""Rewards for programs: the tests of a task, run in a sandbox."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import lru_cache
from pathlib import Path
from typing import Any

from troll.rewards.completion import Completion, completion_text
from troll.rewards.grading import Grader, Verdict
from troll.rewards.machine import default_workers
from troll.rewards.program import Tests, parse_tests, read_program
from troll.rewards.sandbox.bubblewrap import Bubblewrap
from troll.rewards.sandbox.fusion import TIME_LIMIT, SandboxFusion
from troll.rewards.sandbox.gvisor import GVisor
from troll.rewards.sandbox.launch import SandboxError, StarvedError
from troll.rewards.sandbox.limits import Limits, Outcome, printable
from troll.rewards.sandbox.local import LocalSandbox
from troll.rewards.sandbox.pool import Pool
from troll.rewards.sandbox.protocol import Sandbox

Reward = Callable[..., list[float | None]]

#: A program, its tests as text, and whether testing stops at its first failure.
_Job = tuple[str, str, bool]

#: An outcome per test, or what kept the program from being tested.
_Found = list[Outcome] | SandboxError

#: Programs in a row that could not be tested, after which those that wait are not tried.
HOPELESS_PROGRAMS = 4

#: Seconds before the first retry; each further one waits twice as long.
PAUSE = 0.5

#: The name of the sandbox that `gvisor.py` makes.
GVISOR = "gvisor"

#: Programs that run at a time on a server, where nobody says: verl's number.
REMOTE_WORKERS = 64


class CodeGrader(Grader):
    """Runs each completion's program against its tests: 1.0 where all are passed, and 0.0 otherwise.

    Every program gets a sandbox of its own, several run at a time, and equal programs with equal tests run once. What
    it decided last is kept: the reward of all tests and that of their fraction, asked one after the other for one
    batch, run its programs once.

    Trouble of the machine (no memory, no process, a server that is gone) is never a verdict: the programs it hits are
    tried again after the others, for as long as a program of someone else's may keep the machine busy
    (`Limits.wall_seconds`), and are then unscored. Only a program that would not end, in all that time, for want of a
    CPU is judged as if it had used up its own: whoever writes `while True` must not end a run.

    It can be pickled and survives a fork: the processes of a pool make their own sandboxes.

    Args:
        limits: Of each program, over all its tests.
        workers: How many programs run at a time; by default what `default_workers` says of this machine, and 64 on a
            server.
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder.
        partial_credit: Whether all tests of a program are run, so that a verdict's score is the share that are passed.
            Otherwise testing stops at the first failure, and the score is 0.0 or 1.0.
        run_without_isolation: Run programs without a sandbox, as plain processes that can do anything the user can.
        sandbox: What tests programs instead of bubblewrap: "gvisor", the address of a SandboxFusion server, or any
            function as `troll.rewards.sandbox.protocol.Sandbox` describes it.

    Raises:
        SandboxError: There can be no sandbox here; the message says what to install or to allow.
        ValueError: `workers` is below 1, or `sandbox` comes with options that are bubblewrap's.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        workers: int | None = None,
        packages: Sequence[str | Path] = (),
        partial_credit: bool = False,
        run_without_isolation: bool = False,
        sandbox: Sandbox | str | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if (packages and sandbox not in (None, GVISOR)) or (run_without_isolation and sandbox is not None):
            raise ValueError(
                "packages and run_without_isolation are options of bubblewrap, packages also of gVisor: "
                "leave them out with this sandbox"
            )
        self.partial_credit = partial_credit
        self._limits = limits or Limits()
        self._workers = workers
        self._packages = [Path(folder) for folder in packages]
        self._isolated = not run_without_isolation
        self._sandbox = SandboxFusion(sandbox) if isinstance(sandbox, str) and sandbox != GVISOR else sandbox
        self._start()

    def _start(self) -> None:
        workers = self._workers or (
            REMOTE_WORKERS if isinstance(self._sandbox, SandboxFusion) else default_workers(self._limits)
        )
        if self._sandbox is None or isinstance(self._sandbox, str):
            programs = GVisor(packages=self._packages) if self._sandbox == GVISOR else None
            own = Bubblewrap(packages=self._packages, run_without_isolation=not self._isolated)
            local = LocalSandbox(programs or own, own)
            pool = Pool(local, self._limits, workers, local.close)
        else:
            pool = Pool(self._sandbox, self._limits, workers)
        self._pool, self._process = pool, os.getpid()
        self._last: tuple[Any, list[Verdict]] | None = None
        self._finalizer = weakref.finalize(self, Pool.close, pool)

    def grade(
        self,
        completions: Sequence[str],
        tests: Sequence[str] = (),
        prefix: Sequence[str | None] | None = None,
        **columns: Any,
    ) -> list[Verdict]:
        """Judges completions.

        Ctrl-C kills the programs that run.

        Args:
            completions: B texts, as the model wrote them; `read_program` says where a program is in them.
            tests: B texts, each as `parse_tests` takes it.
            prefix: B texts that a completion may continue instead of repeating; None or empty where there is none.
            **columns: Unused; the data set's other columns.

        Returns:
            B verdicts. `score` is 0.0 or 1.0, with `partial_credit` the share of the tests that are passed, and None
            where the program could not be tested; `reason` is why the first failing test fails.

        Raises:
            ValueError: `tests` does not fit; the message names the row.
        """
        if len(tests) != len(completions):
            raise ValueError(f"the column tests has {len(tests)} values for {len(completions)} completions")
        prefixes = [text or "" for text in prefix] if prefix is not None else [""] * len(completions)
        batch = tuple(zip(completions, tests, prefixes, strict=True))
        asked = batch, self.partial_credit
        last = self._last
        if last is None or last[0] != asked:
            last = self._last = asked, self._verdicts(batch)
        return list(last[1])

    def close(self) -> None:
        """Ends programs and judges; the grader can be used again, and then starts new ones."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("partial_credit", "_limits", "_workers", "_packages", "_isolated", "_sandbox")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _verdicts(self, batch: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        parsed: dict[_Job, Tests] = {}
        jobs: list[_Job | None] = []
        for row, (completion, text, prefix) in enumerate(batch):
            try:
                tests = parse_tests(text)
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from None
            program = read_program(completion, tests, prefix)
            jobs.append(None if program is None else (program, text, not self.partial_credit))
            if jobs[-1] is not None:
                parsed[jobs[-1]] = tests
        found = self._insistently(parsed)
        found = {job: [TIME_LIMIT] if isinstance(result, StarvedError) else result for job, result in found.items()}
        return [Verdict(0.0, None, "no program") if job is None else _verdict(job, found[job]) for job in jobs]

    def _insistently(self, jobs: Mapping[_Job, Tests]) -> dict[_Job, _Found]:
        """The outcomes of programs, those that could not be tested tried again once all others have ended."""
        found = self._tested(jobs)
        end, attempt = time.monotonic() + self._limits.wall_seconds, 0
        while failed := [job for job in jobs if isinstance(found[job], SandboxError)]:
            pause = min(PAUSE * 2**attempt, end - time.monotonic())
            if pause <= 0:
                break
            time.sleep(pause)
            # One first: where nothing can be tested, hundreds of programs need not find out. Any one, since some may
            # always fail; and where one can be tested, these must not keep the others from it.
            probe = random.Random(attempt).choice(failed)
            found |= self._tested({probe: jobs[probe]})
            if not isinstance(found[probe], SandboxError):
                found |= self._tested({job: jobs[job] for job in failed if job != probe}, give_up=False)
            attempt += 1
        return found

    def _tested(self, jobs: Mapping[_Job, Tests], *, give_up: bool = True) -> dict[_Job, _Found]:
        """The outcomes of programs, or what kept them from being tested.

        Args:
            jobs: The programs.
            give_up: Whether those that wait are left out once `HOPELESS_PROGRAMS` in a row could not be tested.
        """
        found: dict[_Job, _Found] = {}
        try:
            # After a fork, threads and judges are in the other process; after `close`, they are gone.
            if self._process != os.getpid() or not self._finalizer.alive:
                self._start()
            running = {job: self._pool.submit(job[0], tests, job[2]) for job, tests in jobs.items()}
            failures: list[SandboxError] = []
            for job, future in running.items():
                try:
                    found[job] = future.result()
                    failures.clear()
                except CancelledError:
                    found[job] = failures[-1] if failures else SandboxError("the grader was closed")
                except StarvedError as error:  # which says more about the program than about the machine
                    found[job] = error
                except SandboxError as error:
                    found[job] = error
                    failures.append(error)
                    if give_up and len(failures) == HOPELESS_PROGRAMS:
                        # The machine fails, and not every program need find out.
                        for waiting in running.values():
                            waiting.cancel()
        except SandboxError as error:
            return dict.fromkeys(jobs, error)
        except BaseException:
            self.close()
            raise
        return found


def _verdict(job: _Job, found: _Found) -> Verdict:
    program, _, stopped = job
    if isinstance(found, SandboxError):
        return Verdict(None, program, f"unscored: {printable(str(found))}")
    failures = [outcome.reason for outcome in found if not outcome.passed]
    score = float(not failures) if stopped else (len(found) - len(failures)) / len(found)
    return Verdict(score, program, failures[0] if failures else "correct")


def passed_fraction(grader: CodeGrader) -> Reward:
    """A reward in TRL's signature that is the share of passed tests instead of all or nothing.

    From then on the grader runs all tests of a program. Next to the grader itself as another reward, it runs no program
    a second time.
    """

    def reward(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        verdicts = grader.grade([completion_text(completion) for completion in completions], **columns)
        return [verdict.score for verdict in verdicts]

    grader.partial_credit = True
    reward.__name__ = "passed_fraction"
    vars(reward)["grader"] = grader  # see `leaves_unscored`
    return reward


_making_default = threading.Lock()


@lru_cache(maxsize=4)
def _default_grader(partial_credit: bool, sandbox: str | None) -> CodeGrader:
    return CodeGrader(partial_credit=partial_credit, sandbox=sandbox)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = False,
    sandbox: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Reward in verl's signature; may be called from several threads.

    Args:
        data_source: Unused; part of the signature.
        solution_str: The completion.
        ground_truth: The tests, as `parse_tests` takes them.
        extra_info: Of which `prefix`, if it is there, is what the completion may continue.
        partial: Whether the score is the share of passed tests instead of all or nothing.
        sandbox: What tests programs instead of bubblewrap: "gvisor", or the address of a SandboxFusion server, as in
            verl's `sandbox_fusion.url`. verl passes it on from `custom_reward_function.reward_kwargs`.
        **kwargs: Unused; verl passes more in some configurations.

    Returns:
        `score`, which verl trains on, and what it logs: `acc` (all passed, 0.0 or 1.0) and `reason`.

    Raises:
        SandboxError: There can be no sandbox here, or the program could not be tested; the message names the cause.
            verl has no row without a score.
        ValueError: `ground_truth` is no tests.
    """
    prefix = (extra_info or {}).get("prefix")
    with _making_default:
        grader = _default_grader(partial, sandbox)
    [verdict] = grader.grade([solution_str], tests=[ground_truth], prefix=[prefix])
    if verdict.score is None:
        raise SandboxError(f"a completion is {verdict.reason}")
    return {"score": verdict.score, "acc": float(verdict.success), "reason": verdict.reason}
