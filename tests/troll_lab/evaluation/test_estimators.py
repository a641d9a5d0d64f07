import math
from collections.abc import Callable
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from troll.grading import Verdict
from troll_lab.evaluation.estimators import (
    clustered_interval,
    majority_vote,
    pass_at_k,
    task_estimates,
    wilson_interval,
)

VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=50)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            expected = fmean(any(subset) for subset in combinations(outcomes, k))
            assert pass_at_k(samples, successes, k) == pytest.approx(expected, abs=1e-15)


@given(st.data())
def test_pass_at_k_of_many_completions_is_exact(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 5000))
    successes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    exact = 1 - math.comb(samples - successes, k) / math.comb(samples, k)
    assert pass_at_k(samples, successes, k) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "successes", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["5", "4", "5"], [False, True, False], 0.0),
        (["4", "5"], [True, False], 0.5),
        (["4", "5", "6"], [True, False, False], 1 / 3),
        ([None, None, "4"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        ([], [], 0.0),
        (["4", "4", "5", "5", "6"], [True, True, False, False, False], 0.5),
        (["4", "4"], [True, False], 0.5),
    ],
)
def test_majority_vote(answers: list[str | None], successes: list[bool], expected: float) -> None:
    assert majority_vote(answers, successes) == pytest.approx(expected)


def test_equal_answers_vote_together_and_are_compared_once() -> None:
    asked: list[tuple[str, str]] = []

    def same(first: str, second: str) -> bool:
        asked.append((first, second))
        return float(first) == float(second)

    answers = ["7"] * 40 + ["0.5", ".5", "0.50"] * 15
    successes = [False] * 40 + [True] * 45
    assert majority_vote(answers, successes) == 0.0
    assert majority_vote(answers, successes, same) == 1.0
    assert len(asked) <= 5, "only different strings are compared"
    assert all(first != second for first, second in asked)


@given(st.lists(st.tuples(st.sampled_from([None, "1", "01", "2", "02", "3"]), st.booleans()), max_size=9))
def test_majority_vote_by_brute_force(votes: list[tuple[str | None, bool]]) -> None:
    """Of every class, the share of the right ones; of the largest classes, the mean."""
    classes: dict[int, list[bool]] = {}
    for answer, success in votes:
        if answer is not None:
            classes.setdefault(int(answer), []).append(success)
    largest = max(map(len, classes.values()), default=0)
    expected = [fmean(members) for members in classes.values() if len(members) == largest]
    answers, successes = [answer for answer, _ in votes], [success for _, success in votes]
    value = majority_vote(answers, successes, lambda first, second: int(first) == int(second))
    assert value == pytest.approx(fmean(expected) if expected else 0.0)


def test_relation_that_is_not_transitive_joins_by_frequency() -> None:
    answers, successes = ["b"] + ["a"] * 3 + ["c"] * 2, [True] + [False] * 3 + [True] * 2
    # a and c are not the same, and b is the same as both: it joins a, which is more frequent.
    assert majority_vote(answers, successes, lambda first, second: "b" in (first, second)) == 0.25


@given(st.integers(1, 3000), st.data())
def test_wilson_interval_is_scipys(size: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, size))
    expected = stats.binomtest(successes, size).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes / size, size) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(VALUES | st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=200), st.integers(1, 64), st.data())
def test_interval_is_wilsons_with_the_effective_size(values: list[float], samples: int, data: st.DataObject) -> None:
    questions = data.draw(st.lists(st.integers(0, 9), min_size=len(values), max_size=len(values)) | st.none())
    asked = np.arange(len(values)) if questions is None else np.array(questions)
    mean, count = float(np.mean(values)), len(set(asked.tolist()))
    variance = (
        sum(np.sum(np.array(values)[asked == each] - mean) ** 2 for each in set(asked.tolist())) / len(values) ** 2
    )
    assume(mean in (0, 1) or count == 1 or variance > 1e-12)
    most = len(values) * samples
    size = count if mean in (0, 1) or count == 1 else min(most, max(count, mean * (1 - mean) / variance))
    low, high = clustered_interval(values, samples, questions)
    assert (low, high) == pytest.approx(wilson_interval(mean, size), abs=1e-9)
    assert 0 <= low < high <= 1


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.7), (2.0, 2.0), (50.0, 50.0)])
def test_interval_covers_the_mean_of_the_population(first: float, second: float) -> None:
    """30 problems whose chance of success is drawn from a beta distribution, 8 completions each."""
    random, hits, trials = np.random.default_rng(0), 0, 1000
    for _ in range(trials):
        values = random.binomial(8, random.beta(first, second, size=30)) / 8
        low, high = clustered_interval(values.tolist(), 8)
        hits += low <= first / (first + second) <= high
    assert 0.92 < hits / trials < 0.98


def test_interval_over_questions_covers_the_mean() -> None:
    """150 questions, of which one in five is easy and asked four times, with chances that vary among the questions."""
    random, hits, trials = np.random.default_rng(1), 0, 1000
    for _ in range(trials):
        easy = random.random(150) < 0.2
        chances = np.where(easy, random.beta(4, 2, size=150), random.beta(1, 3, size=150))
        questions = np.repeat(np.arange(150), np.where(easy, 4, 1))
        values = (random.random(len(questions)) < chances[questions]).astype(float)
        low, high = clustered_interval(values.tolist(), 1, questions.tolist())
        hits += low <= (0.2 * 4 * 4 / 6 + 0.8 / 4) / (0.2 * 4 + 0.8) <= high
    assert 0.92 < hits / trials < 0.98


@pytest.mark.parametrize(("values", "mean"), [([0.25] * 8 + [0.26] * 8, 0.255), ([0.5] * 16, 0.5)])
def test_completions_count_as_independent_ones_at_most(values: list[float], mean: float) -> None:
    assert clustered_interval(values, 4) == pytest.approx(wilson_interval(mean, 64))


def verdict(score: float | None, answer: str | None = None) -> Verdict:
    return Verdict(score, answer, "")


def equal(first: str, second: str) -> bool:
    return float(first) == float(second)


def values(problems: list[list[Verdict]], ks: list[int] | None = None, **more: Any) -> dict[str, float]:
    return {name: estimate.value for name, estimate in task_estimates(problems, ks, **more).items()}


RIGHT, WRONG, UNSCORED = verdict(1.0, "1"), verdict(0.0, "2"), verdict(None, "4")
PROBLEMS = [
    [verdict(1.0, "4"), verdict(0.0, "5"), verdict(1.0, "4"), verdict(0.5)],
    [verdict(0.0, "1"), verdict(0.0, "2"), verdict(0.0, "1.0"), verdict(1.0, "3")],
]


def test_task_estimates_has_every_metric() -> None:
    metrics = values(PROBLEMS, [4, 2, 2, 1], same=equal)
    assert list(metrics) == ["pass@1", "pass@2", "pass@4", "mean@4", "maj@4"]
    expected = [(2 / 4 + 1 / 4) / 2, (5 / 6 + 3 / 6) / 2, 1.0, (2.5 / 4 + 1 / 4) / 2, 0.5]
    assert list(metrics.values()) == pytest.approx(expected)
    assert list(values(PROBLEMS)) == ["pass@1", "pass@4", "mean@4"]
    assert values([[RIGHT], [WRONG]], same=equal) == {"pass@1": 0.5, "mean@1": 0.5}


@pytest.mark.parametrize(
    ("problems", "questions", "interval"),
    [
        ([[RIGHT]] * 10 + [[WRONG]] * 30, None, (0.25, 40)),
        ([[RIGHT] * 8] * 10 + [[WRONG] * 8] * 30, None, (0.25, 40)),  # copies say nothing new
        ([[RIGHT], [RIGHT], [WRONG], [WRONG]], ["a", "a", "b", "b"], (0.5, 2)),
    ],
)
def test_task_estimates_has_intervals_over_questions(
    problems: list[list[Verdict]], questions: list[str] | None, interval: tuple[float, int]
) -> None:
    found = task_estimates(problems, questions=questions)["pass@1"]
    assert found.interval == pytest.approx(wilson_interval(*interval))


def test_task_estimates_leaves_out_unscored_completions() -> None:
    problems = [
        [verdict(1.0, "4"), UNSCORED, verdict(0.0, "5"), UNSCORED],
        [UNSCORED, UNSCORED, UNSCORED, verdict(0.5)],
        [UNSCORED] * 4,
        PROBLEMS[1],
    ]
    metrics = values(problems, [1, 2, 4], same=equal)
    # Of one completion there are no two.
    expected = [(1 / 2 + 0 + 1 / 4) / 3, (1 + 3 / 6) / 2, 1.0, (1 / 2 + 1 / 2 + 1 / 4) / 3, (1 / 2 + 0 + 0) / 3]
    assert metrics == pytest.approx(dict(zip(["pass@1", "pass@2", "pass@4", "mean@4", "maj@4"], expected, strict=True)))
    assert task_estimates(problems, [1])["pass@1"].interval == clustered_interval([1 / 2, 0, 1 / 4], 1)
    assert task_estimates([[UNSCORED] * 4], same=equal) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(4, 5, 1), "successes must be between"),
        (lambda: pass_at_k(4, -1, 1), "successes must be between"),
        (lambda: pass_at_k(4, 2, 5), "k must be between"),
        (lambda: pass_at_k(4, 2, 0), "k must be between"),
        (lambda: majority_vote(["1"], [True, False]), "one length, got 1 and 2"),
        (lambda: clustered_interval([0.0, 1.0], 1, ["a"]), "one length, got 2 and 1"),
        (lambda: clustered_interval([], 1), "at least one problem"),
        (lambda: task_estimates([]), "got no problem"),
        (lambda: task_estimates([[]]), "at least one completion"),
        (lambda: task_estimates([PROBLEMS[0], PROBLEMS[1][:2]]), "same number of completions, got 2, 4"),
        (lambda: task_estimates(PROBLEMS, [5]), "k must be between 1 and samples=4, got 5"),
        (lambda: task_estimates(PROBLEMS, [0]), "k must be between 1 and samples=4, got 0"),
    ],
)
def test_estimators_refuse(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
