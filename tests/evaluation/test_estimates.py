from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from troll.evaluation.estimates import task_estimates
from troll.evaluation.estimators import clustered_interval, wilson_interval
from troll.rewards.grading import Verdict


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


def test_every_number() -> None:
    metrics = values(PROBLEMS, [4, 2, 2, 1], same=equal)
    assert list(metrics) == ["pass@1", "pass@2", "pass@4", "mean@4", "maj@4"]
    assert metrics["pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert metrics["pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["pass@4"] == 1.0
    assert metrics["mean@4"] == pytest.approx((2.5 / 4 + 1 / 4) / 2)
    assert metrics["maj@4"] == pytest.approx(0.5)


def test_what_is_measured_by_default() -> None:
    assert list(values(PROBLEMS)) == ["pass@1", "pass@4", "mean@4"]
    alone = [[verdict(1.0, "1")], [verdict(0.0, "2")]]
    assert values(alone, same=equal) == {"pass@1": 0.5, "mean@1": 0.5}


def test_intervals_are_over_problems() -> None:
    alone = [[verdict(float(index % 4 == 0))] for index in range(40)]
    assert task_estimates(alone)["pass@1"].interval == pytest.approx(wilson_interval(0.25, 40))
    copied = [problem * 8 for problem in alone]
    # Copies of a completion say nothing new about the model.
    assert task_estimates(copied)["pass@1"].interval == pytest.approx(wilson_interval(0.25, 40))


def test_what_could_not_be_judged_is_left_out() -> None:
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
    ("problems", "ks", "message"),
    [
        ([], None, "got no problem"),
        ([[]], None, "at least one completion"),
        ([PROBLEMS[0], PROBLEMS[1][:2]], None, "same number of completions, got 2, 4"),
        (PROBLEMS, [5], "k must be between 1 and samples=4, got 5"),
        (PROBLEMS, [0], "k must be between 1 and samples=4, got 0"),
    ],
)
def test_mistakes(problems: list[list[Verdict]], ks: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_estimates(problems, ks)


def test_metrics_take_neither_torch_nor_transformers() -> None:
    program = "import sys, troll.evaluation.estimates; print(*{'transformers', 'trl', 'datasets'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
