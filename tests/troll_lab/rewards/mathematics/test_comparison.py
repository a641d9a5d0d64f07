import time
from unittest.mock import Mock

import pytest

from tests.troll_lab.rewards.mathematics import kinds
from tests.troll_lab.rewards.mathematics.hostile_answers import HOSTILE
from troll_lab.rewards.mathematics import grader
from troll_lab.rewards.mathematics.grader import compare
from troll_lab.rewards.mathematics.pool import Comparison
from troll_lab.rewards.mathematics.texts import MAX_CHARACTERS

_GRANTED = {
    "18 km": ("18 m",),  # units are not compared
    "50": (r"50\%",),
    "0.5": (r"50\%",),
    "18": ("2x + 1 = 18", "20 - 2"),  # the last side of an equation, and an unfinished calculation
    "(1, 2)": ("1, 2",),
    # A calculation left to do, next to its result or in the gold answer.
    r"\sum_{n=1}^{100} n": (r"\sum_{k=1}^{100} k", "5050"),
    "5050": (r"\sum_{n=1}^{100} n = 5050", r"x = \sum_{n=1}^{100} n = 5050"),
    r"\int_0^1 x^2 dx": (r"\int_0^1 x^2 \, dx", r"\frac{1}{3}"),
}


def _accepted(table):
    """All pairs of a gold answer and an answer, and those that are found equal."""
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    return pairs, [pair for pair, found in zip(pairs, compare(pairs), strict=True) if found is Comparison.EQUAL]


@pytest.mark.parametrize("table", [kinds.RIGHT, kinds.READ, _GRANTED], ids=["right", "read", "granted"])
def test_compare_accepts_right_answers(table):
    pairs, accepted = _accepted(table)
    assert accepted == pairs


@pytest.mark.parametrize(
    "table",
    [kinds.WRONG, kinds.MISREAD, kinds.LEFT_TO_DO, kinds.UNSOLVED, kinds.MORE],
    ids=["wrong", "misread", "left to do", "unsolved", "more"],
)
def test_compare_refuses_wrong_answers(table):
    pairs, _ = _accepted(table)
    assert [pair for pair, each in zip(pairs, compare(pairs), strict=True) if each is not Comparison.DIFFERENT] == []


def test_compare_keeps_order_and_asks_once(monkeypatch):
    ask = Mock(return_value=[Comparison.EQUAL])
    monkeypatch.setattr(grader, "ask", ask)
    pairs = [("9", r"\frac{18}{2}"), ("9", "8"), ("9", r"\frac{18}{2}"), ("9", "9")]
    found = [Comparison.EQUAL, Comparison.DIFFERENT, Comparison.EQUAL, Comparison.EQUAL]
    assert compare(pairs) == found
    ask.assert_called_once_with(pairs[:1], 2.0, False)
    assert compare([]) == []


def test_long_answers_are_no_answers():
    gold = "1" * (MAX_CHARACTERS + 1)
    pairs = [("1", gold), (gold, gold), (gold, "1"), ("+".join(["1"] * 300), "300")]
    assert [found is Comparison.EQUAL for found in compare(pairs)] == [False, True, False, True]


@pytest.mark.parametrize("gold", ["18", pytest.param(r"\frac{1}{1+x^2}", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cpu_seconds", [0.05, pytest.param(2.0, marks=pytest.mark.slow)])
def test_hostile_answers_are_wrong(gold, cpu_seconds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    comparisons = compare([(gold, answer) for answer in HOSTILE.values()], cpu_seconds)
    assert {name: found for name, found in zip(HOSTILE, comparisons, strict=True) if found.score != 0} == {}
    assert Comparison.TIME_LIMIT in comparisons
    assert Comparison.FAILED not in comparisons
    assert time.process_time() - start < 5  # in this process, megabytes included
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hostile", ["9^{9^{9^9}}", "999999999!", r"\binom{999999999}{499999999}"])
def test_hostile_answer_costs_no_other_verdict(hostile):
    answers = [rf"\frac{{{i}}}{{2}}" for i in range(12, 22)]
    answers[4:4] = [hostile]
    expected = [Comparison.DIFFERENT] * 4 + [Comparison.TIME_LIMIT] + [Comparison.DIFFERENT] * 6
    expected[7] = Comparison.EQUAL
    assert compare([("9", answer) for answer in answers], cpu_seconds=0.3) == expected
