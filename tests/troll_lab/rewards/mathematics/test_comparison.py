import time

import pytest

from tests.troll_lab.rewards.mathematics.hostile_answers import HOSTILE
from tests.troll_lab.rewards.mathematics.kinds import LEFT_TO_DO, MORE, RIGHT, UNSOLVED, WRONG, accepted
from troll_lab.rewards.mathematics.grader import compare
from troll_lab.rewards.mathematics.pool import Comparison
from troll_lab.rewards.mathematics.texts import MAX_CHARACTERS


def _compare(gold, answer):
    return compare([(gold, answer)])[0]


def _pairs(table):
    return [(gold, answer) for gold, answers in table.items() for answer in answers]


_GRANTED = [
    ("18 km", "18 m"),  # units are not compared
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    ("18", "2x + 1 = 18"),  # the last side of an equation
    ("18", r"20 - 2"),  # an unfinished calculation
    ("(1, 2)", "1, 2"),
    # A calculation left to do, next to its result or in the gold answer.
    (r"\sum_{n=1}^{100} n", r"\sum_{k=1}^{100} k"),
    (r"\sum_{n=1}^{100} n", "5050"),
    ("5050", r"\sum_{n=1}^{100} n = 5050"),
    ("5050", r"x = \sum_{n=1}^{100} n = 5050"),
    (r"\int_0^1 x^2 dx", r"\int_0^1 x^2 \, dx"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
]


@pytest.mark.parametrize("right", [_pairs(RIGHT), _GRANTED], ids=["right", "granted"])
def test_compare_accepts_right_answers(right):
    assert accepted(right) == right


@pytest.mark.parametrize(
    "table", [WRONG, LEFT_TO_DO, UNSOLVED, MORE], ids=["wrong", "calculations left to do", "unsolved", "more"]
)
def test_compare_refuses_wrong_answers(table):
    assert accepted(_pairs(table)) == []


def test_a_batch_keeps_its_order_and_asks_once():
    pairs = [("9", rf"\frac{{{i % 50}}}{{2}}") for i in range(512)] + [("9", "9"), ("9", "8")]
    expected = [i % 50 == 18 for i in range(512)] + [True, False]
    assert [comparison is Comparison.EQUAL for comparison in compare(pairs)] == expected
    start = time.monotonic()
    assert compare([("1", "9^{9^{9^9}}")] * 512, cpu_seconds=0.2) == [Comparison.TIME_LIMIT] * 512
    assert time.monotonic() - start < 20
    assert compare([]) == []


def test_long_answers_are_no_answers():
    gold = "1" * (MAX_CHARACTERS + 1)
    assert _compare("1", gold) is Comparison.DIFFERENT
    assert _compare(gold, gold) is Comparison.EQUAL
    assert _compare(gold, "1") is Comparison.DIFFERENT
    assert _compare("+".join(["1"] * 300), "300") is Comparison.EQUAL


@pytest.mark.parametrize("gold", ["18", pytest.param(r"\frac{1}{1+x^2}", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cpu_seconds", [0.05, pytest.param(2.0, marks=pytest.mark.slow)])
def test_hostile_answers(gold, cpu_seconds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    comparisons = compare([(gold, answer) for answer in HOSTILE.values()], cpu_seconds)
    equal = [name for name, found in zip(HOSTILE, comparisons, strict=True) if found is Comparison.EQUAL]
    assert equal == []
    assert Comparison.TIME_LIMIT in comparisons
    assert Comparison.FAILED not in comparisons
    assert time.process_time() - start < 5  # in this process, megabytes included
    assert not list(tmp_path.iterdir())
    assert _compare("9", r"\frac{18}{2}") is Comparison.EQUAL


def test_a_hostile_answer_costs_its_time_limit_and_no_other_verdict():
    good = [("9", rf"\frac{{{i}}}{{2}}") for i in range(60)]
    expected = [Comparison.EQUAL if i == 18 else Comparison.DIFFERENT for i in range(60)]
    compare(good)
    for hostile in ("9^{9^{9^9}}", "999999999!", r"\binom{999999999}{499999999}"):
        pairs = [*good[:25], ("9", hostile), *good[25:]]
        assert compare(pairs, cpu_seconds=0.3) == [*expected[:25], Comparison.TIME_LIMIT, *expected[25:]]
