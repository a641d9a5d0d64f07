"""A reward for right programs that need less CPU time than a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from troll.grading import Completion, Verdict, completion_text
from troll_lab.rewards.code import CodeGrader, Reward


def time_saved(grader: CodeGrader, *, runs: int = 3, resolution: float = 0.01) -> Reward:
    """Makes a reward with TRL's signature for the CPU time that a right program saves compared with a reference.

    With t the CPU seconds of a program in all its tests, t* those of the reference, and r the resolution, a program
    that passes all tests gets

        max(0, 1 − (t + r) / (t* + r)),

    for example 0.5 for half the time. A program that fails a test gets 0. The reference is a program of the data set
    that runs in the same sandbox, so the reward means the same on every machine. The kernel counts both times from
    outside, with all threads, so neither sleeping nor a changed clock helps. If the grader itself is another reward of
    the same trainer, no completion runs a second time.

    Args:
        grader: The grader that tests the programs, in bubblewrap, which measures their CPU time.
        runs: How often a reference is run when it is first needed, at least 1. Its fastest run counts from then on, so
            that a copy of it gets little more than 0.
        resolution: r, in seconds, above 0. CPU times vary with the load of the machine and from run to run: differences
            far below r hardly change the reward.

    Returns:
        A function from B completions to B numbers in [0, 1), and None where a program could not be tested. It reads the
        columns `tests` and `prefix` like the grader, and `reference`: B programs in the form of completions.

    Raises:
        ValueError: If `runs` or `resolution` is out of its range. From the function: if a reference fails its tests, or
            the sandbox measures no CPU time; the message names the row.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    if not 0 < resolution < math.inf:
        raise ValueError(f"resolution must be finite and above 0, got {resolution}")
    fastest: dict[tuple[str, str, str], float] = {}  # by the reference, its tests and its prefix

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        *,
        tests: Sequence[str],
        reference: Sequence[str],
        prefix: Sequence[str | None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        verdicts = grader.grade(list(map(completion_text, completions)), tests=tests, prefix=prefix)
        prefixes = [None] * len(verdicts) if prefix is None else prefix
        cases = [(text, test, before or "") for text, test, before in zip(reference, tests, prefixes, strict=True)]
        rows = {case: row for row, case in enumerate(cases) if verdicts[row].success and case not in fastest}
        rounds = [grader.run(list(rows)) for _ in range(runs)]
        for number, (case, row) in enumerate(rows.items()):
            tries = [each[number] for each in rounds]
            scored = [verdict for verdict in tries if verdict.score is not None]
            if scored:  # one that fails where another passes was near a limit
                passed = [verdict for verdict in scored if verdict.success] or scored
                fastest[case] = min(_seconds(verdict, f"row {row}: the reference") for verdict in passed)
        return [_saved(verdict, fastest.get(case), resolution) for verdict, case in zip(verdicts, cases, strict=True)]

    reward.__name__ = "time_saved"
    vars(reward)["grader"] = grader  # see `leaves_unscored`
    return reward


def _saved(verdict: Verdict, reference: float | None, resolution: float) -> float | None:
    """The share of the reference's seconds that a program saves; None if one of the two could not be tested."""
    if not verdict.success:
        return verdict.reward
    if reference is None:
        return None
    seconds = _seconds(verdict, "a program")
    return max(0.0, 1 - (seconds + resolution) / (reference + resolution))


def _seconds(verdict: Verdict, what: str) -> float:
    """The CPU seconds of a program; raises ValueError if it is not right or they were not measured."""
    if not verdict.success:
        raise ValueError(f"{what} does not pass its tests: {verdict.reason}")
    if verdict.cpu_seconds is None:
        raise ValueError(f"{what} has no CPU time: time_saved takes a CodeGrader with bubblewrap, which measures it")
    return verdict.cpu_seconds
