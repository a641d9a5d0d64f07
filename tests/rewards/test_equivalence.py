import time

import pytest

from tests.rewards.hostile_answers import HOSTILE
from troll.rewards.equivalence import MAX_CHARACTERS, compare
from troll.rewards.equivalence_pool import Comparison


def _compare(gold, answer, **settings):
    return compare([(gold, answer)], **settings)[0]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *[
            ("72", answer)
            for answer in ("72", " 72 ", "72.00", "072", "+72", "$72", r"\$72", "€72", "72.", "7.2e1", "72^\\circ")
        ],
        *[
            ("72", answer)
            for answer in ("72 dollars", r"72\text{ dollars}", r"72~\mathrm{cm}^2", "72 degrees", r"\(72\)")
        ],
        *[
            ("72", answer)
            for answer in (r"\frac{144}{2}", r"\dfrac{144}{2}", "144/2", "x = 72", "70+2=72", r"\text{Area} = 72")
        ],
        *[("1000", answer) for answer in ("1,000", "1{,}000", r"\$1,000.00", "x = 1,000", r"10^3", "1e3", "1,000 m")],
        *[("-5", answer) for answer in ("−5", "-5.0", "x=-5", "-|5|", r"-\sqrt{25}")],
        *[("0.5", answer) for answer in (r"\frac12", r"\frac{1}{2}", ".5", "1/2", r"2^{-1}", r"50\%")],
        *[("16", answer) for answer in ("1.6e1", r"1.6 \times 10^{1}", r"1.6\cdot 10^1", "2^4", r"\sqrt{256}")],
        *[("4.5e33", answer) for answer in (r"4.5 \times 10^{33}", "45e32", "4.5E+33", r"45 \cdot 10^{32}")],
        *[("2.88e-19", answer) for answer in (r"2.88 \times 10^{-19}", "28.8e-20", r"2.88e-19 \mathrm{~J}")],
        *[(r"\frac13", answer) for answer in ("1/3", "0.333333", r"\frac{2}{6}", r"3^{-1}")],
        *[(r"\frac32", answer) for answer in (r"1\frac12", r"1\frac{1}{2}", "1 1/2", "1.5")],
        *[(r"\text{(B)}", answer) for answer in ("B", "(B)", r"\text{B}", r"\textbf{(B)}", r"\mathrm{B}")],
        *[("1, 2, 3", answer) for answer in ("3, 2, 1", r"\{1, 2, 3\}", r"1, 2 \text{ and } 3", "x=1, x=2, x=3")],
        (r"\{1, 2\}", r"x = 2 \text{ or } x = 1"),
        ("[1, 2)", "[1,2)"),
        ("(1, 2)", r"\left( 1, \frac{4}{2} \right)"),
        (r"(-\infty, 1) \cup (2, \infty)", r"(2,\infty) \cup (-\infty,1)"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{bmatrix}"),
        (r"45^\circ", "45"),
        (r"\sqrt{8}", r"2\sqrt2"),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
        ("x=5", "5"),
        ("2^{10}", "1024"),
        ("x^2-1", "(x+1)(x-1)"),
        (r"\frac{1}{2a}(\exp{a*t} - \exp{-a*t})", r"\frac{e^{at} - e^{-at}}{2a}"),
        ("1011_2", "1011_{2}"),
        (r"3.14 \approx \pi", r"3.14 \approx \pi"),
    ],
)
def test_right(gold, answer):
    assert _compare(gold, answer) is Comparison.EQUAL


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *[
            ("18", answer)
            for answer in ("19", "17", "-18", "1.8", "180", "8", "18.5", "18.0000001", "18e1", r"\frac{1}{18}", "18!")
        ],
        # Several answers in one.
        *[
            ("18", answer)
            for answer in ("1, 2, 18", "17, 18", "18; 20", "18 or 20", r"18 \text{ or } 20", r"\pm 18", r"18 \pm 2")
        ],
        *[
            ("18", answer)
            for answer in (r"x \in \{17, 18\}", "x=17, x=18", "x=17, 18", "(17, 18)", "[18, 20]", "18, 20")
        ],
        *[("18", answer) for answer in (r"18\text{ or 20}", r"18 \text{ (or maybe 20)}", r"18 \text{ or twenty}")],
        *[
            ("18", answer)
            for answer in (r"\boxed{17} 18", r"18 \boxed{17}", r"20} or \boxed{18", "18} 20", r"\fbox{18} 20")
        ],
        *[("18", answer) for answer in ("17 = 18", "x = 17 = 18", "18 = 20", r"18 \approx 20", "18 ≈ 20", "18 ~= 20")],
        *[
            ("18", answer)
            for answer in ("17 1", "10 8", r"10\,8", "10(8)", "(10)8", "{10}{8}", r"10\quad 8", r"10^\circ 8")
        ],
        *[
            ("18", answer)
            for answer in (r"18 \text{ hours} 20 \text{ minutes}", "18:20", "18 to 20", "18-20", "18...20", "18/20")
        ],
        # Words about an answer.
        *[
            ("18", answer)
            for answer in ("not 18", r"\text{not } 18", "18 is wrong, 20", r"18 \text{ is wrong, } 20", "~18?")
        ],
        *[
            ("18", answer)
            for answer in (r"\text{18 or 20}", "the answer is 18 or not", r"\neg 18", r"17 \to 18", r"17 \neq 18")
        ],
        # Relations and other kinds of things.
        *[
            ("3", answer)
            for answer in (
                "x > 3",
                r"x \ge 3",
                r"x \neq 3",
                "2 < 3",
                "x",
                "3x",
                "x^3",
                r"\infty",
                "",
                " ",
                "()",
                r"\emptyset",
            )
        ],
        # A unit is dropped, its number is not converted.
        *[("1.6 cm", answer) for answer in ("16 cm", "16 mm", "0.016 m", "1.6e1 cm")],
        *[("18 km", answer) for answer in ("18000 m", r"18{,}000 \text{ m}", "1.8 km")],
        # What math-verify rounds or chops away.
        *[
            ("2.88e-19", answer)
            for answer in ("0", "2.89e-19", r"2.89 \times 10^{-19}", r"\frac{1}{10^{19}}", "10^{-18}")
        ],
        *[
            (r"1.6 \times 10^{-19}", answer)
            for answer in ("0", r"1.7 \times 10^{-19}", "1.6e-18", r"-1.6 \times 10^{-19}")
        ],
        *[("0.006", answer) for answer in ("0.0060004", "0.0060004 m", r"\frac{60004}{10000000}")],
        *[(r"\frac13", answer) for answer in ("0.33", "0.3333", r"\frac{1}{4}", r"33\%")],
        *[(r"\pi", answer) for answer in ("3.14", "3.1415", r"\frac{22}{7}")],
        *[("1e-8", answer) for answer in ("e-8", "0", "1e8", "-8+e")],
        # Other bases, letters, orders.
        *[("1011_2", answer) for answer in ("1011_3", "1101_2")],
        *[("18", answer) for answer in ("18_{20}", "18_b", "18i", "18x", "0x18", "18٫5")],
        *[
            ("B", answer)
            for answer in ("A", "A, B", "AB", r"\text{not B}", r"\text{A or B}", r"\text{(A) or (B)}", "C or B")
        ],
        *[("[1, 2)", answer) for answer in ("(1, 2]", "[1, 2]", "[1, 3)", "1, 2")],
        ("1, 2, 3", "1, 2"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        ("x=5", "y=5"),
        ("x=5", "6"),
        ("1 1/2", "1"),
        ("1", "1 1/2"),
    ],
)
def test_wrong(gold, answer):
    assert _compare(gold, answer) is not Comparison.EQUAL


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18 km", "18 m"),  # units are not compared
        ("50", r"50\%"),
        ("0.5", r"50\%"),
        ("18", "18, 18"),
        ("18", r"\{18\}"),
        ("18", "2x + 1 = 18"),  # the last side of an equation
        ("18", r"20 - 2"),  # an unfinished calculation
        ("(1, 2)", "1, 2"),
    ],
)
def test_what_math_verify_grants(gold, answer):
    assert _compare(gold, answer) is Comparison.EQUAL


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


@pytest.mark.parametrize("gold", ["18", r"\frac{1}{1+x^2}"])
@pytest.mark.parametrize("cpu_seconds", [0.1, pytest.param(2.0, marks=pytest.mark.slow)])
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
    good = [("9", rf"\frac{{{i}}}{{2}}") for i in range(255)]
    expected = [Comparison.EQUAL if i == 18 else Comparison.DIFFERENT for i in range(255)]
    compare(good)
    for hostile in ("9^{9^{9^9}}", "999999999!", r"\binom{999999999}{499999999}"):
        pairs = [*good[:100], ("9", hostile), *good[100:]]
        assert compare(pairs, cpu_seconds=0.5) == [*expected[:100], Comparison.TIME_LIMIT, *expected[100:]]
