import math
from collections.abc import Callable
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from troll.grading import Verdict
from troll_lab.evaluation.estimators import (
    clustered_interval,
    majority_vote,
    pass_at_k,
    task_estimates,
    wilson_interval,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            expected = fmean(any(subset) for subset in combinations(outcomes, k))
            assert pass_at_k(samples, successes, k) == pytest.approx(expected, abs=1e-15)


@given(st.data())
def test_pass_at_k_for_many_completions(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 5000))
    successes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    value = pass_at_k(samples, successes, k)
    assert 0 <= value <= 1
    exact = 1 - math.comb(samples - successes, k) / math.comb(samples, k)
    assert value == pytest.approx(exact, abs=1e-12)
    logs = [special.gammaln(x + 1) for x in (samples - successes, samples - k, samples - successes - k, samples)]
    if samples - successes >= k:
        assert value == pytest.approx(1 - math.exp(logs[0] + logs[1] - logs[2] - logs[3]), abs=1e-7)
    if k < samples:
        assert value <= pass_at_k(samples, successes, k + 1) + 1e-12
    assert pass_at_k(samples, successes, 1) == pytest.approx(successes / samples)


def test_pass_at_k_has_no_bias() -> None:
    chance, samples, k = 0.3, 6, 4
    expected = sum(
        stats.binom.pmf(successes, samples, chance) * pass_at_k(samples, successes, k)
        for successes in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


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


def test_answers_that_are_the_same_vote_together() -> None:
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
    value = majority_vote(
        [answer for answer, _ in votes], [success for _, success in votes], lambda a, b: int(a) == int(b)
    )
    assert value == pytest.approx(fmean(expected) if expected else 0.0)
    assert 0 <= value <= 1


def test_a_relation_that_is_not_transitive_joins_by_frequency() -> None:
    answers, successes = ["b"] + ["a"] * 3 + ["c"] * 2, [True] + [False] * 3 + [True] * 2
    # a and c are not the same, and b is the same as both: it joins a, which is more frequent.
    assert majority_vote(answers, successes, lambda first, second: "b" in (first, second)) == 0.25


@given(st.integers(1, 3000), st.data())
def test_wilson_interval_is_scipys(size: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, size))
    expected = stats.binomtest(successes, size).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes / size, size) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.integers(1, 64))
def test_with_values_of_0_and_1_the_interval_is_wilsons(outcomes: list[bool], samples: int) -> None:
    values = [float(outcome) for outcome in outcomes]
    expected = wilson_interval(fmean(values), len(values))
    assert clustered_interval(values, samples) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 64))
def test_the_interval_holds_the_mean_and_has_a_width(values: list[float], samples: int) -> None:
    low, high = clustered_interval(values, samples)
    assert 0 <= low <= fmean(values) + 1e-12
    assert fmean(values) - 1e-12 <= high <= 1
    assert high - low > 0
    assert wilson_interval(min(1.0, fmean(values)), len(values))[1] >= high - 1e-9, "never wider than of one completion"


def test_for_many_problems_the_interval_is_the_normal_one() -> None:
    values = (np.random.default_rng(0).binomial(8, 0.4, size=5000) / 8).tolist()
    half = 1.959964 * np.std(values) / math.sqrt(len(values))
    assert clustered_interval(values, 8) == pytest.approx((fmean(values) - half, fmean(values) + half), abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.7), (2.0, 2.0), (50.0, 50.0)])
def test_the_interval_covers_the_mean_of_the_population(first: float, second: float) -> None:
    """30 problems whose chance of success is drawn from a beta distribution, 8 completions each."""
    random, hits, trials = np.random.default_rng(0), 0, 1000
    for _ in range(trials):
        values = random.binomial(8, random.beta(first, second, size=30)) / 8
        low, high = clustered_interval(values.tolist(), 8)
        hits += low <= first / (first + second) <= high
    assert 0.92 < hits / trials < 0.98


def test_completions_say_no_more_than_independent_ones() -> None:
    values = [0.25] * 8 + [0.26] * 8
    assert clustered_interval(values, 4) == pytest.approx(wilson_interval(0.255, 64))
    assert clustered_interval([0.5] * 16, 4) == pytest.approx(wilson_interval(0.5, 64))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 5))
def test_a_question_asked_several_times_counts_as_one(values: list[float], times: int) -> None:
    again = clustered_interval(values * times, 1, list(range(len(values))) * times)
    assert again[1] - again[0] >= clustered_interval(values, times)[1] - clustered_interval(values, times)[0] - 1e-9
    if not any(0 < value < 1 for value in values):
        assert again == pytest.approx(wilson_interval(fmean(values), len(values)), abs=1e-9)


def test_the_interval_over_questions_covers_the_mean_of_the_population() -> None:
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


def test_task_estimates_has_intervals_over_questions() -> None:
    right, wrong = [verdict(1.0)], [verdict(0.0)]
    found = task_estimates([right, right, wrong, wrong], questions=["a", "a", "b", "b"])["pass@1"]
    assert (found.value, found.interval) == (0.5, pytest.approx(wilson_interval(0.5, 2)))


def verdict(score: float | None, answer: str | None = None) -> Verdict:
    return Verdict(score, answer, "")


def values(problems: list[list[Verdict]], ks: list[int] | None = None, **more: Any) -> dict[str, float]:
    return {name: estimate.value for name, estimate in task_estimates(problems, ks, **more).items()}


PROBLEMS = [
    [verdict(1.0, "4"), verdict(0.0, "5"), verdict(1.0, "4"), verdict(0.5)],
    [verdict(0.0, "1"), verdict(0.0, "2"), verdict(0.0, "1.0"), verdict(1.0, "3")],
]


def equal(first: str, second: str) -> bool:
    return float(first) == float(second)


def test_task_estimates_gives_every_metric() -> None:
    metrics = values(PROBLEMS, [4, 2, 2, 1], same=equal)
    assert list(metrics) == ["pass@1", "pass@2", "pass@4", "mean@4", "maj@4"]
    assert metrics["pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert metrics["pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["pass@4"] == 1.0
    assert metrics["mean@4"] == pytest.approx((2.5 / 4 + 1 / 4) / 2)
    assert metrics["maj@4"] == pytest.approx(0.5)


def test_task_estimates_measures_pass_at_1_and_n_by_default() -> None:
    assert list(values(PROBLEMS)) == ["pass@1", "pass@4", "mean@4"]
    alone = [[verdict(1.0, "1")], [verdict(0.0, "2")]]
    assert values(alone, same=equal) == {"pass@1": 0.5, "mean@1": 0.5}


def test_task_estimates_has_intervals_over_problems() -> None:
    alone = [[verdict(float(index % 4 == 0))] for index in range(40)]
    assert task_estimates(alone)["pass@1"].interval == pytest.approx(wilson_interval(0.25, 40))
    copied = [problem * 8 for problem in alone]
    # Copies of a completion say nothing new about the model.
    assert task_estimates(copied)["pass@1"].interval == pytest.approx(wilson_interval(0.25, 40))


def test_task_estimates_leaves_out_unscored_completions() -> None:
    unscored = verdict(None, "4")
    problems = [
        [verdict(1.0, "4"), unscored, verdict(0.0, "5"), unscored],
        [unscored, unscored, unscored, verdict(0.5)],
        [unscored] * 4,
        PROBLEMS[1],
    ]
    metrics = values(problems, [1, 2, 4], same=equal)
    assert metrics["pass@1"] == pytest.approx((1 / 2 + 0 + 1 / 4) / 3)
    assert metrics["pass@2"] == pytest.approx((1 + 3 / 6) / 2)  # of one completion there are no two
    assert metrics["pass@4"] == 1.0
    assert metrics["mean@4"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert metrics["maj@4"] == pytest.approx((1 / 2 + 0 + 0) / 3)
    estimate = task_estimates(problems, [1])["pass@1"]
    assert estimate.interval == clustered_interval([1 / 2, 0, 1 / 4], 1)
    assert task_estimates([[unscored] * 4], same=equal) == {}
    without = [[each for each in problem if each.score is not None] for problem in problems[:1]]
    assert values(problems[:1], [1, 2]) == pytest.approx(
        {"mean@4" if name == "mean@2" else name: value for name, value in values(without, [1, 2]).items()}
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(4, 5, 1), "must be between"),
        (lambda: pass_at_k(4, -1, 1), "must be between"),
        (lambda: pass_at_k(4, 2, 5), "must be between"),
        (lambda: pass_at_k(4, 2, 0), "must be between"),
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
def test_what_cannot_be_estimated_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
