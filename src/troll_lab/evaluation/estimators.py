"""Estimates from n completions of each problem, and the confidence intervals of their means over problems.

These are pure functions of Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from troll.grading import Verdict

Interval = tuple[float, float]
#: Whether two answers count as one; symmetric, and called only for different strings.
SameAnswer = Callable[[str, str], bool]

_NORMAL_QUANTILE = 1.959963984540054  # the standard normal's 97.5 % quantile


class Estimate(NamedTuple):
    """A mean over problems, in [0, 1], and its 95 % interval by `clustered_interval`."""

    value: float
    interval: Interval


def task_estimates(
    verdicts: Sequence[Sequence[Verdict]],
    ks: Iterable[int] | None = None,
    *,
    questions: Sequence[Hashable] | None = None,
    same: SameAnswer | None = None,
) -> dict[str, Estimate]:
    """Estimates a model's performance on a task from n completions of each of N problems.

    Completions that could not be judged are left out. A problem counts with its other completions, and does not count
    in a pass@k with k above their number. If no problem has enough completions for a metric, it is missing.

    Args:
        verdicts: For each of N problems, the verdicts of its n completions.
        ks: Sizes k ≤ n for pass@k, in any order; 1 and n by default.
        questions: The question of each problem, which a generator of tasks may repeat; None if all are different.
        same: Whether two different answers count as one in a majority vote, such as
            `troll.grading.Grader.same_answer`; None for no vote, where answers cannot be compared.

    Returns:
        By name: `pass@k` for every k in ascending order, the probability that one of k completions succeeds; `mean@n`,
        the mean score, in which partial credit counts; and, with `same` and n > 1, `maj@n`, the probability that the
        most frequent answer is right. Each with its interval over questions.

    Raises:
        ValueError: If problems or completions are missing, problems have different numbers of completions, or a k is
            below 1 or above n.
    """
    counts = sorted({len(problem) for problem in verdicts})
    if len(counts) != 1:
        found = ", ".join(map(str, counts)) or "no problem"
        raise ValueError(f"every problem must have the same number of completions, got {found}")
    samples = counts[0]
    if samples < 1:
        raise ValueError("every problem must have at least one completion")
    sizes = sorted({1, samples} if ks is None else set(ks))
    if wrong := [k for k in sizes if not 1 <= k <= samples]:
        raise ValueError(f"k must be between 1 and samples={samples}, got {wrong[0]}")
    scored = [[verdict for verdict in problem if verdict.score is not None] for problem in verdicts]
    asked = range(len(verdicts)) if questions is None else questions
    judged = [(question, problem) for question, problem in zip(asked, scored, strict=True) if problem]
    by_problem = {
        f"pass@{k}": [
            (question, pass_at_k(len(problem), sum(verdict.success for verdict in problem), k))
            for question, problem in judged
            if len(problem) >= k
        ]
        for k in sizes
    }
    by_problem[f"mean@{samples}"] = [
        (question, fmean(verdict.score for verdict in problem if verdict.score is not None))
        for question, problem in judged
    ]
    if same is not None and samples > 1:
        by_problem[f"maj@{samples}"] = [
            (
                question,
                majority_vote([verdict.answer for verdict in problem], [verdict.success for verdict in problem], same),
            )
            for question, problem in judged
        ]
    fewest = min((len(problem) for _, problem in judged), default=0)
    return {name: _estimate(values, fewest) for name, values in by_problem.items() if values}


def _estimate(values: Sequence[tuple[Hashable, float]], samples: int) -> Estimate:
    """The mean of the values of problems, each with its question."""
    return Estimate(
        fmean(value for _, value in values),
        clustered_interval([value for _, value in values], samples, [question for question, _ in values]),
    )


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The probability that at least one of k completions succeeds, estimated from n ≥ k of them without bias.

    1 − C(n − c, k) / C(n, k), the share of the subsets of k completions that contain a success (Chen et al., 2021,
    "Evaluating Large Language Models Trained on Code", equation 1), as a product of ratios, none of which overflows.

    Args:
        samples: n, the number of completions.
        successes: c, how many of them succeed.
        k: The size of the subsets.

    Returns:
        A value in [0, 1].

    Raises:
        ValueError: If not 0 ≤ c ≤ n or not 1 ≤ k ≤ n.
    """
    if not 0 <= successes <= samples:
        raise ValueError(f"successes must be between 0 and samples={samples}, got {successes}")
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and samples={samples}, got {k}")
    if samples - successes < k:
        return 1.0
    # C(n − c, k) / C(n, k) = Π_{i = n − c + 1}^{n} (1 − k / i)
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - successes + 1, samples + 1))


def majority_vote(answers: Sequence[str | None], successes: Sequence[bool], same: SameAnswer | None = None) -> float:
    """The probability that the answer given most often is right.

    Answers that are the same string are one class. Classes are then joined if `same` holds for their most frequent
    strings, so that an expensive relation is computed only for different strings. It need not be transitive: strings
    are taken by falling frequency, and each joins the first class whose first string equals it by `same`.

    If several classes are the largest, each is chosen with the same probability. If the members of the chosen class
    were not all judged the same, the verdict is that of a random member. The result is the expectation over both
    choices, so no random number decides.

    Args:
        answers: The final answers of n completions; None, for a completion without an answer, does not vote.
        successes: Whether each completion succeeds.
        same: Whether two different answers count as one; None for equality of strings.

    Returns:
        A value in [0, 1]; 0 without any votes.

    Raises:
        ValueError: If there are not as many answers as successes.
    """
    if len(answers) != len(successes):
        raise ValueError(f"answers and successes must have one length, got {len(answers)} and {len(successes)}")
    votes: dict[str, list[bool]] = {}
    for answer, success in zip(answers, successes, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(success)
    if not votes:
        return 0.0
    classes: list[tuple[str, list[bool]]] = []
    for answer in sorted(votes, key=lambda text: -len(votes[text])):  # stable: ties by first appearance
        joined = next((members for first, members in classes if same is not None and same(first, answer)), None)
        if joined is None:
            classes.append((answer, list(votes[answer])))
        else:
            joined += votes[answer]
    most = max(len(members) for _, members in classes)
    return fmean(fmean(members) for _, members in classes if len(members) == most)


def wilson_interval(success: float, size: float) -> Interval:
    """The 95 % Wilson score interval of a binomial proportion.

    Args:
        success: The observed proportion, in [0, 1].
        size: The number of independent trials behind it, at least 1; an effective number need not be whole.

    Returns:
        The interval's lower and upper end, both in [0, 1].
    """
    z = _NORMAL_QUANTILE
    centre = success + z * z / (2 * size)
    spread = z * math.sqrt(success * (1 - success) / size + z * z / (4 * size * size))
    scale = 1 + z * z / size
    # The ends are exactly 0 and 1 where the proportion is, which rounding would miss by an ulp.
    low = 0.0 if success == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if success == 1 else min(1.0, (centre + spread) / scale)
    return low, high


def clustered_interval(values: Sequence[float], samples: int, questions: Sequence[Hashable] | None = None) -> Interval:
    """The 95 % interval of a mean over problems, whose completions are not independent of each other.

    Wilson's interval with an effective number of trials, as in surveys with clusters (Korn and Graubard, 1998): the
    number of independent trials whose proportion would vary as much as the mean over problems does. With x the values,
    m their mean, N their number, and Q different questions,

        size = m (1 − m) / σ²,    σ² = Σ_questions (Σ_its problems (x − m))² / N²,    Q ≤ size ≤ N · samples.

    The upper limit holds because N · n completions have no more information than N · n independent ones. If every value
    is 0 or 1, as with one completion a problem, and no question is asked twice, then size = N, and this is Wilson's
    interval itself. Unlike a normal interval and the bootstrap, it stays within [0, 1] and has a width even if all
    values are equal.

    Args:
        values: One estimate for each problem, in [0, 1]; at least one.
        samples: The number of completions behind each value.
        questions: The question of each problem; None if all are different.

    Returns:
        The interval's lower and upper end, both in [0, 1].

    Raises:
        ValueError: If `values` is empty, or there is not one question for each value.
    """
    if not values:
        raise ValueError("an interval needs at least one problem")
    if questions is not None and len(questions) != len(values):
        raise ValueError(f"values and questions must have one length, got {len(values)} and {len(questions)}")
    problems, mean = len(values), min(1.0, max(0.0, fmean(values)))
    deviations: dict[Hashable, float] = {}
    for question, value in zip(range(problems) if questions is None else questions, values, strict=True):
        deviations[question] = deviations.get(question, 0.0) + value - mean
    # m = 0 or 1 also has a variance of zero: the completions of a problem may then be as good as copies.
    # A single question says nothing about others, however often it is asked.
    if mean in (0.0, 1.0) or len(deviations) == 1:
        return wilson_interval(mean, len(deviations))
    variance, most = sum(x * x for x in deviations.values()) / problems**2, problems * samples
    size = most if variance == 0 else min(most, max(len(deviations), mean * (1 - mean) / variance))
    return wilson_interval(mean, size)
