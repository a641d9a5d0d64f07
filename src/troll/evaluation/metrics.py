"""The numbers of an evaluation, from verdicts only: neither a model nor a file is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from troll.evaluation.estimators import Interval, SameAnswer, clustered_interval, majority_vote, pass_at_k
from troll.rewards.grading import Verdict


@dataclass(frozen=True)
class Estimate:
    """A mean over problems.

    Attributes:
        value: The mean, in [0, 1].
        interval: Its 95 % interval, see :func:`~troll.evaluation.estimators.clustered_interval`.
    """

    value: float
    interval: Interval


def task_estimates(
    verdicts: Sequence[Sequence[Verdict]], ks: Iterable[int] | None = None, *, same: SameAnswer | None = None
) -> dict[str, Estimate]:
    """What n completions of each of N problems say about a model on a task.

    Completions that could not be judged are left out: a problem counts with those that are left, and not at all in a
    pass@k for more completions than these. A number for which no problem has enough is missing.

    Args:
        verdicts: For each of N problems, the verdicts of its n completions.
        ks: Sizes k ≤ n for pass@k, in any order; 1 and n by default.
        same: Whether two answers that differ as strings count as one in a majority vote, such as
            `troll.rewards.grading.Grader.same_answer`; None where answers cannot be compared, so that nothing is voted.

    Returns:
        By name: `pass@k` for every k in ascending order, the probability that one of k completions succeeds; `mean@n`,
        the mean score, in which partial credit counts; and, with `same` and n > 1, `maj@n`, the probability that the
        most frequent answer is right. Each with its interval over problems.

    Raises:
        ValueError: If there is no problem or no completion, problems have different numbers of completions, or a k is
            below 1 or above n.
    """
    found = _by_problem(verdicts, ks, same)
    samples = min((count for problem in verdicts if (count := len(_scored(problem)))), default=0)
    return {name: Estimate(fmean(values), clustered_interval(values, samples)) for name, values in found.items()}


def task_metrics(
    verdicts: Sequence[Sequence[Verdict]], ks: Iterable[int] | None = None, *, same: SameAnswer | None = None
) -> dict[str, float]:
    """The values of :func:`task_estimates`, which says more, without their intervals: what a trainer logs.

    Args:
        verdicts: For each of N problems, the verdicts of its n completions.
        ks: Sizes k ≤ n for pass@k; 1 and n by default.
        same: Whether two answers count as one in a majority vote; None for no vote.

    Returns:
        By name, such as `pass@1`, `pass@8`, `mean@8`, `maj@8`: the mean over problems.

    Raises:
        ValueError: If the verdicts or a k cannot be used.
    """
    return {name: fmean(values) for name, values in _by_problem(verdicts, ks, same).items()}


def _by_problem(
    verdicts: Sequence[Sequence[Verdict]], ks: Iterable[int] | None, same: SameAnswer | None
) -> dict[str, list[float]]:
    """The values of every metric, one for each problem that has any."""
    samples = _samples(verdicts)
    sizes = sorted({1, samples} if ks is None else set(ks))
    if wrong := [k for k in sizes if not 1 <= k <= samples]:
        raise ValueError(f"k must be between 1 and samples={samples}, got {wrong[0]}")
    judged = [judged for problem in verdicts if (judged := _scored(problem))]
    by_problem = {
        f"pass@{k}": [
            pass_at_k(len(problem), sum(verdict.success for verdict, _ in problem), k)
            for problem in judged
            if len(problem) >= k
        ]
        for k in sizes
    }
    by_problem[f"mean@{samples}"] = [fmean(score for _, score in problem) for problem in judged]
    if same is not None and samples > 1:
        by_problem[f"maj@{samples}"] = [
            majority_vote([verdict.answer for verdict, _ in problem], [verdict.success for verdict, _ in problem], same)
            for problem in judged
        ]
    return {name: values for name, values in by_problem.items() if values}


def _scored(problem: Sequence[Verdict]) -> list[tuple[Verdict, float]]:
    """The verdicts that have a score, with it."""
    return [(verdict, verdict.score) for verdict in problem if verdict.score is not None]


def _samples(verdicts: Sequence[Sequence[Verdict]]) -> int:
    sizes = {len(problem) for problem in verdicts}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no problem"
        raise ValueError(f"every problem must have the same number of completions, got {found}")
    samples = sizes.pop()
    if samples < 1:
        raise ValueError("every problem must have at least one completion")
    return samples
