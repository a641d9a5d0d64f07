"""The metrics of an evaluation, computed from verdicts only."""

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
        interval: The 95 % interval of the mean, by `troll.evaluation.estimators.clustered_interval`.
    """

    value: float
    interval: Interval


def task_estimates(
    verdicts: Sequence[Sequence[Verdict]], ks: Iterable[int] | None = None, *, same: SameAnswer | None = None
) -> dict[str, Estimate]:
    """Estimates a model's performance on a task from n completions of each of N problems.

    Completions that could not be judged are left out. A problem counts with its other completions, and does not count
    in a pass@k with k above their number. A metric for which no problem has enough completions is missing.

    Args:
        verdicts: For each of N problems, the verdicts of its n completions.
        ks: Sizes k ≤ n for pass@k, in any order; 1 and n by default.
        same: Whether two different answers count as one in a majority vote, such as
            `troll.rewards.grading.Grader.same_answer`; None if answers cannot be compared: then there is no vote.

    Returns:
        By name: `pass@k` for every k in ascending order, the probability that one of k completions succeeds; `mean@n`,
        the mean score, in which partial credit counts; and, with `same` and n > 1, `maj@n`, the probability that the
        most frequent answer is right. Each with its interval over problems.

    Raises:
        ValueError: If there is no problem or no completion, problems have different numbers of completions, or a k is
            below 1 or above n.
    """
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
    fewest = min(map(len, judged), default=0)
    return {
        name: Estimate(fmean(values), clustered_interval(values, fewest))
        for name, values in by_problem.items()
        if values
    }


def _scored(problem: Sequence[Verdict]) -> list[tuple[Verdict, float]]:
    """The verdicts with a score, each with its score."""
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
