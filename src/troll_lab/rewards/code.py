"""Rewards for programs: the tests of a task, run in a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from troll.grading import Completion, Grader, Verdict, completion_text, printable
from troll_lab.rewards.machine import processes
from troll_lab.rewards.program import read_program
from troll_lab.rewards.tests import parse_tests
from troll_sandbox import (
    Bubblewrap,
    Executor,
    GVisor,
    Job,
    Limits,
    LocalSandbox,
    Outcome,
    Sandbox,
    SandboxError,
    SandboxFusion,
)

Reward = Callable[..., list[float | None]]

#: The name that selects gVisor.
GVISOR = "gvisor"

#: Programs that a server runs at a time by default: verl's number.
REMOTE_WORKERS = 64

#: Memory for one program, in units of `memory_bytes`: the program may use one, and its judge two.
SHARES = 3


class CodeGrader(Grader):
    """Runs each completion's program against its tests: 1.0 if all are passed, and 0.0 otherwise.

    Every program gets its own sandbox, several run at a time, and equal programs with equal tests run once. The
    verdicts of the last batch are kept, so that the reward of all tests and the fraction of passed tests run the
    programs once.

    A failure of the machine (no memory, no process, no server) is never a verdict. The affected programs run again
    after the others, for up to `Limits.wall_seconds`, and are then unscored. A program that gets too little CPU time
    to finish in all this time counts as over its time limit: `while True` in a program must not end a training run. One
    that is killed four times in tests of its functions fails.

    A grader can be pickled and survives a fork: the processes of a pool make their own sandboxes.

    Args:
        limits: The limits of each program; by default `Limits()`.
        workers: The number of programs that run at a time, at least 1. By default one for each CPU core that this
            process may use, fewer if its memory is small, and 64 on a server.
        packages: Folders of Python packages that programs may import, e.g. a site-packages folder.
        partial_credit: Whether all tests of a program are run, so that a verdict's score is the share that are passed.
            Otherwise testing stops at the first failure, and the score is 0.0 or 1.0.
        run_without_isolation: Run programs without a sandbox, as plain processes that can do anything the user can.
        sandbox: The sandbox to use instead of bubblewrap: "gvisor", the address of a SandboxFusion server, or any
            function that [Sandbox][troll_sandbox.Sandbox] describes.

    Raises:
        SandboxError: If no sandbox can start here; the message says what to install or to allow.
        ValueError: If `workers` is below 1, or `sandbox` comes with options of bubblewrap.
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
        limits, remote = self._limits, isinstance(self._sandbox, SandboxFusion)
        workers = self._workers or (REMOTE_WORKERS if remote else default_workers(limits))
        self._executor = Executor(
            partial(_make_sandbox, self._sandbox, self._packages, self._isolated), limits, workers
        )
        self._last: tuple[Any, list[Verdict]] | None = None

    def grade(
        self,
        completions: Sequence[str],
        tests: Sequence[str] = (),
        prefix: Sequence[str | None] | None = None,
        **columns: Any,
    ) -> list[Verdict]:
        """Judges completions. Ctrl-C kills the running programs.

        Args:
            completions: B texts, as the model wrote them. The program is a fenced block of Python, with the definitions
                that it needs from other blocks, or the whole text if it has no blocks.
            tests: B texts in a form of [parse_tests][troll_lab.rewards.parse_tests].
            prefix: B texts that a completion may continue instead of repeating; None or empty for none.
            **columns: Unused; the data set's other columns.

        Returns:
            B verdicts. `score` is 0.0 or 1.0, or with `partial_credit` the share of passed tests; it is None if the
            program could not be tested. `reason` is that of the first failing test.

        Raises:
            ValueError: If `tests` does not fit; the message names the row.
        """
        if len(tests) != len(completions):
            raise ValueError(f"the column tests has {len(tests)} values for {len(completions)} completions")
        prefixes = [text or "" for text in prefix] if prefix is not None else [""] * len(completions)
        batch = tuple(zip(completions, tests, prefixes, strict=True))
        asked = batch, self.partial_credit
        last = self._last
        if last is None or last[0] != asked:
            last = self._last = asked, self.run(batch)
        return list(last[1])

    def close(self) -> None:
        """Ends programs and judges; the grader can be used again, and then starts new ones."""
        self._executor.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("partial_credit", "_limits", "_workers", "_packages", "_isolated", "_sandbox")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def run(self, batch: Sequence[tuple[str, str, str]]) -> list[Verdict]:
        """Judges a batch of (completion, tests, prefix) like `grade`, but without the verdicts of the last batch."""
        jobs: dict[tuple[str, str], Job] = {}  # by the program and the text of its tests
        keys: list[tuple[str, str] | None] = []
        for row, (completion, text, prefix) in enumerate(batch):
            try:
                tests = parse_tests(text)
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from None
            program = read_program(completion, tests, prefix)
            keys.append(None if program is None else (program, text))
            if program is not None:
                jobs[program, text] = Job(program, tests, stop_at_failure=not self.partial_credit)
        verdicts = dict(zip(jobs, map(_verdict, jobs.values(), self._executor.run(list(jobs.values()))), strict=True))
        return [Verdict(0.0, None, "no program") if key is None else verdicts[key] for key in keys]


def default_workers(limits: Limits) -> int:
    """The programs to run at a time by default, if every program and its judge use all of their memory."""
    return processes(SHARES * limits.memory_bytes + limits.disk_bytes)


def _make_sandbox(
    sandbox: Sandbox | str | None, packages: Sequence[Path], isolated: bool
) -> tuple[Sandbox, Callable[[], None] | None]:
    if sandbox is not None and not isinstance(sandbox, str):
        return sandbox, None
    programs = GVisor(packages=packages) if sandbox == GVISOR else None
    own = Bubblewrap(packages=packages, run_without_isolation=not isolated)
    local = LocalSandbox(programs or own, own)
    return local, local.close


def _verdict(job: Job, found: list[Outcome] | SandboxError) -> Verdict:
    if isinstance(found, SandboxError):
        return Verdict(None, job.program, f"unscored: {printable(str(found))}")
    failures = [outcome.reason for outcome in found if not outcome.passed]
    score = float(not failures) if job.stop_at_failure else (len(found) - len(failures)) / len(found)
    measured = [outcome.cpu_seconds for outcome in found if outcome.cpu_seconds is not None]
    seconds = sum(measured) if len(measured) == len(found) else None
    return Verdict(score, job.program, failures[0] if failures else "correct", seconds)


def passed_fraction(grader: CodeGrader) -> Reward:
    """Makes a reward with TRL's signature that is the share of passed tests, instead of all or nothing.

    If the grader itself is another reward of the same trainer, no program runs a second time.

    Args:
        grader: The grader that tests the programs; from now on it runs all tests of a program.

    Returns:
        A function from B completions to B numbers in [0, 1], and None where a program could not be tested.
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
        ground_truth: The tests, in a form of [parse_tests][troll_lab.rewards.parse_tests].
        extra_info: May have a `prefix`, the code that the completion may continue; the rest is not used.
        partial: Whether the score is the share of passed tests instead of all or nothing.
        sandbox: The sandbox to use instead of bubblewrap: "gvisor", or the address of a SandboxFusion server, as in
            verl's `sandbox_fusion.url`. verl passes it on from `custom_reward_function.reward_kwargs`.
        **kwargs: Unused; further arguments that verl passes in some configurations.

    Returns:
        `score`, on which verl trains, and for its log `acc` (1.0 if all tests passed, else 0.0) and `reason`.

    Raises:
        SandboxError: If no sandbox can start here, or the program could not be tested; the message names the cause.
            verl needs a score in every row.
        ValueError: If `ground_truth` does not hold tests.
    """
    prefix = (extra_info or {}).get("prefix")
    with _making_default:
        grader = _default_grader(partial, sandbox)
    [verdict] = grader.grade([solution_str], tests=[ground_truth], prefix=[prefix])
    if verdict.score is None:
        raise SandboxError(f"a completion is {verdict.reason}")
    return {"score": verdict.score, "acc": float(verdict.success), "reason": verdict.reason}
