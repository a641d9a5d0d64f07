import time

import pytest

from tests.rewards.mathematics.hostile_answers import HOSTILE
from tests.rewards.mathematics.kinds import RIGHT, WRONG
from troll.rewards.mathematics.comparison import compare
from troll.rewards.mathematics.pool import Comparison
from troll.rewards.mathematics.texts import MAX_CHARACTERS


def _compare(gold, answer):
    return compare([(gold, answer)])[0]


def _accepted(pairs):
    return [pair for pair, found in zip(pairs, compare(pairs), strict=True) if found is Comparison.EQUAL]


_RIGHT = [
    *[
        ("72", answer)
        for answer in ("72", " 72 ", "72.00", "072", "+72", "$72", r"\$72", "€72", "72.", "7.2e1", "72^\\circ")
    ],
    *[
        ("72", answer)
        for answer in (
            "72 dollars",
            "72 USD",
            "x = 72 dollars",
            r"72\text{ dollars}",
            r"72~\mathrm{cm}^2",
            "72 degrees",
            r"\(72\)",
        )
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
    # Spellings.
    *[
        ("1/2", answer)
        for answer in (r"\frac1{2}", r"\frac{1}2", r"\frac 1 2", r"\tfrac 12", r"50 \%", r"50\,\%", "50 percent")
    ],
    *[("5/12", answer) for answer in (r"\frac 5{12}", r"\frac5{12}", r"\dfrac {5} {12}", r"\frac{10}{24}")],
    *[(r"50\%", answer) for answer in (r"50 \%", r"50\,\%", r"50~\%", "50", r"50\text{ percent}")],
    (r"50 \%", r"50\%"),
    *[
        ("1000", answer)
        for answer in (r"1\,000", "1 000", r"1\ 000", "1~000", r"1\!000", "1\u202f000", "1 000 miles", "x = 1 000")
    ],
    *[("12345678", answer) for answer in ("12 345 678", r"12\,345\,678", r"12{,}345{,}678")],
    *[("60", answer) for answer in ("60°", r"60\degree", r"60^{\circ}", "60 ° ", r"60\ ", r"60\,")],
    *[("18", answer) for answer in ("18 clips", "18 in^2", "18 m^{2}", "18 hours", r"\text{18}", "{18}")],
    *[(r"7 \text{ cm}^2", answer) for answer in ("7 cm^2", r"7\mathrm{cm}^{2}", "7")],
    *[
        ("18", rf"18 \text{{ {unit}}}")
        for unit in (
            "two-liter bottles",
            "third graders",
            "cm squared",
            "times",
            "tents",
            "people's votes",
            "halfs",
        )
    ],
    *[(r"5 \text{ million}", answer) for answer in (r"5\text{ million dollars}", r"\$5 \text{ Million}")],
    *[(r"\text{B}", answer) for answer in (r"\text{B.}", r"\textbf{(B).}", r"\text{(B)}", "b")],
    *[("3+4i", answer) for answer in ("3+4 i", r"3+4\mathrm{i}", "4i+3", r"3 + 4\,i", r"3 + 4 \cdot i")],
    *[
        ("10:30", answer)
        for answer in (
            r"10{:}30",
            r"\text{10:30}",
            "10:30 a.m.",
            r"10:30 \text{ PM}",
            r"\text{10:30 AM}",
            "t=10:30",
        )
    ],
    *[(r"9:05 \text{ AM}", answer) for answer in ("09:05", "9:05 am", r"\text{9:05 a.m.}")],
    # An interval as an inequality, sets and pairs.
    *[("[0, 1)", answer) for answer in (r"0 \le x < 1", r"x \in [0,1)", "1 > x \\ge 0")],
    *[(r"(-\infty, 3]", answer) for answer in (r"x \le 3", r"3 \ge x")],
    *[("(1, 2)", answer) for answer in ("(x,y) = (1,2)", "x=1, y=2", r"(\frac22, 2)")],
    *[(r"\{1, 2\}", answer) for answer in ("1, 2", "2, 1", r"\left\{2,1\right\}")],
    (r"\{18\}", "18"),
    # Primes and letters.
    *[("f'(x)", answer) for answer in (r"f^{\prime}(x)", r"f^\prime(x)", "y = f'(x)")],
    *[("2x", answer) for answer in ("f'(x) = 2x", r"f^{\prime}(x) = 2x")],
    ("y'+2y=0", r"2y + y^{\prime} = 0"),
    ("y''", r"y^{\prime\prime}"),
    *[("ABC", answer) for answer in ("A B C", r"A \cdot B \cdot C", r"\text{ABC}", "x = ABC")],
    *[(r"\text{even}", answer) for answer in ("even", r"\text{Even}")],
    (r"A \text{ and } C", r"C \text{ and } A"),
    ("xy", r"\frac{x^2 y}{x}"),
    (r"3.14 \approx \pi", r"3.14 \approx \pi"),
]


def test_right():
    assert _accepted(_RIGHT) == _RIGHT


_WRONG = [
    *[
        ("18", answer)
        for answer in ("19", "17", "-18", "1.8", "180", "8", "18.5", "18.0000001", "18e1", r"\frac{1}{18}", "18!")
    ],
    # Several answers in one.
    *[
        ("18", answer)
        for answer in ("1, 2, 18", "17, 18", "18; 20", "18 or 20", r"18 \text{ or } 20", r"\pm 18", r"18 \pm 2")
    ],
    *[("18", answer) for answer in (r"x \in \{17, 18\}", "x=17, x=18", "x=17, 18", "(17, 18)", "[18, 20]", "18, 20")],
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
    *[("2.88e-19", answer) for answer in ("0", "2.89e-19", r"2.89 \times 10^{-19}", r"\frac{1}{10^{19}}", "10^{-18}")],
    *[(r"1.6 \times 10^{-19}", answer) for answer in ("0", r"1.7 \times 10^{-19}", "1.6e-18", r"-1.6 \times 10^{-19}")],
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
    # Words that are numbers or operations.
    *[
        ("18", rf"18\text{{ {words}}}")
        for words in ("million", "thousand", "hundred", "dozen", "million dollars", "half", "twenty-one", "fifths")
    ],
    *[
        ("3", rf"3\text{{ {words}}}")
        for words in ("minus one", "plus two", "squared", "cubed", "factorial", "/ four", ", maybe four", "(four)")
    ],
    *[
        ("18", answer)
        for answer in (
            r"18\text{ or so}",
            r"18\text{, not more}",
            "18}20{",
            "18}{20",
            r"\$18 \text{ million}",
            r"18\mathrm{ twenty}",
            r"18\mbox{ hundred}",
        )
    ],
    *[("18", answer) for answer in ("18 thousand", "18 fifths", "18 dozen", "18million", "18 pi", "18 x", "18 i")],
    (r"5 \text{ million}", r"5 \text{ thousand}"),
    # Spellings of other numbers.
    *[("1018", answer) for answer in ("10 18", "1 0018", r"10\,18", "1 018 5")],
    *[("1000", answer) for answer in (r"1\,00", "10 00", "1 0000", "1 000 000", "1 000 thousand", "1 000 0")],
    *[("1/2", answer) for answer in (r"\frac1{3}", r"\frac 1 3", r"\frac2 1", "5 \\%", r"0.5\,\%", r"\frac11 2")],
    *[("50", answer) for answer in (r"50\% 1", r"5 \%", r"50 \%\%")],
    *[("60", answer) for answer in ("6°", r"60\degree 30")],
    *[("3+4i", answer) for answer in ("3-4 i", r"4+3\mathrm{i}", "7", "3+4")],
    ("18", r"18\mathrm{i}"),
    # Times are not divided.
    *[
        ("10:30", answer)
        for answer in (
            "5:15",
            "20:60",
            "1/3",
            r"\frac13",
            "10",
            "10:03",
            "10:30:15",
            "10:30-11:00",
            "1030",
            "22:30",
        )
    ],
    *[("4:30", answer) for answer in ("8:60", "2:15")],
    (r"9:05 \text{ AM}", r"9:05 \text{ p.m.}"),
    # Sets, pairs, intervals, what is not seen.
    *[("18", answer) for answer in (r"\{18\}", "[18,18]", r"\left\{18\right\}", r"\phantom{18}", r"18\hphantom{0}0")],
    *[("(1, 2)", answer) for answer in (r"\{1, 2\}", r"\left\{1,2\right\}", "1 < x < 2", "(2, 1)")],
    *[(r"\{1, 2\}", answer) for answer in ("(1, 2)", "(2, 1)", "[1, 2]")],
    *[("[0, 1)", answer) for answer in (r"0 \le x \le 1", "0 < x < 1", "x < 1", r"\{0, 1\}")],
    ("B", r"\{B\}"),
    # Primes and letters.
    *[("f(x)", answer) for answer in ("f'(x)", r"f^{\prime}(x)")],
    *[("f'(x)", answer) for answer in ("f(x)", "f''(x)")],
    *[("B", answer) for answer in ("B'", r"\text{B'}", r"B^\prime", r"B\prime")],
    *[("ABC", answer) for answer in ("CBA", r"\text{CBA}", r"C \cdot B \cdot A", "AB")],
    *[(r"\text{ABC}", "CBA"), ("no", "on"), ("DNE", "END"), (r"\text{even}", "neve")],
    ("1 1/2", "1"),
    ("1", "1 1/2"),
]


def test_wrong():
    assert _accepted(_WRONG) == []


# A sum, a product, an integral, a limit or a derivative that is left to do, by the number that it is.
_RESTATED = {
    "5050": (
        r"\sum_{n=1}^{100} n",
        r"\displaystyle\sum_{k=1}^{100} k",
        r"\left(\sum_{n=1}^{100} n\right)",
        r"2 \sum_{n=1}^{100} \frac{n}{2}",
        r"\frac{1}{2}\sum_{n=1}^{100} 2n",
        r"\sum_{n=1}^{100} n \text{ units}",
        r"\sum_{n=0}^{99} (n+1)",
        r"x = \sum_{n=1}^{100} n",
        r"\sum_{n=1}^{100} n = \sum_{k=1}^{100} k",
        r"0 + \sum_{i=1}^{100} i",
        r"\sqrt{(\sum_{i=1}^{100} i)^2}",
        r"\max(\sum_{i=1}^{100} i, 1)",
        r"\int_0^{5050} 1 dx",
    ),
    r"x = 5050": (r"x = \sum_{n=1}^{100} n", r"\sum_{n=1}^{100} n"),
    r"5050 \text{ cm}": (r"\sum_{n=1}^{100} n \text{ cm}",),
    "2": (
        r"\sum_{n=0}^{\infty} \frac{1}{2^n}",
        r"\int_0^{\pi} \sin x dx",
        r"\int_0^{\pi} \sin(x) \, dx",
        r"\lim_{x \to 1} \frac{x^2-1}{x-1}",
    ),
    r"\frac{\pi^2}{6}": (r"\sum_{n=1}^{\infty} \frac{1}{n^2}",),
    "e": (r"\sum_{n=0}^{\infty} \frac{1}{n!}", r"\lim_{n \to \infty} (1+\frac{1}{n})^n"),
    r"\ln 2": (
        r"\sum_{n=1}^{\infty} \frac{(-1)^{n+1}}{n}",
        r"\int_1^2 \frac{1}{x} dx",
        r"\int_1^2 \frac{dx}{x}",
    ),
    "120": (r"\prod_{i=1}^{5} i", r"\prod_{k=1}^5 k + 0", r"2 \prod_{i=3}^{5} i"),
    "101": (r"\prod_{k=1}^{100} \frac{k+1}{k}",),
    r"\frac{1}{2}": (
        r"\int_0^1 x \, dx",
        r"\int_{0}^{1} x dx",
        r"\lim_{x \to 0} \frac{1-\cos x}{x^2}",
        r"\prod_{k=2}^{2} \frac{1}{k}",
    ),
    r"50\%": (r"\int_0^1 x dx",),
    r"\pi": (r"\int_0^1 \frac{4}{1+x^2} dx", r"4 \int_0^1 \sqrt{1-x^2} dx"),
    "e-1": (r"\int_0^1 e^x dx",),
    "1": (r"\int_0^\infty e^{-x} dx", r"\lim_{x \to 0} \frac{\sin x}{x}", r"\sum_{n=1}^{\infty} 2^{-n}"),
    "0": (r"\lim_{x \to \infty} \frac{1}{x}",),
    "4": (r"\lim_{h \to 0} \frac{(2+h)^2-4}{h}", r"\frac{d}{dx} (4x)", r"\int_0^1 \int_0^1 16xy dx dy"),
    "1, 2": (r"\sum_{i=1}^{1} i, 2",),
    r"\{1, 2\}": (r"\{\int_0^1 2x dx, 2\}",),
    "x=1, x=2": (r"x=1, x=\int_0^2 x dx",),
    "(1, 2)": (r"(\int_0^1 2x dx, 2)",),
    "[0, 55]": (r"[0, \sum_{i=1}^{10} i]",),
}


def test_compare_refuses_calculations_left_to_do():
    pairs = [(gold, answer) for gold, answers in _RESTATED.items() for answer in answers]
    assert len(pairs) >= 50
    assert _accepted(pairs) == []


_LEFT_TO_DO = [
    (r"\sum_{n=1}^{100} n", r"\sum_{k=1}^{100} k"),
    (r"\sum_{n=1}^{100} n", "5050"),
    ("5050", r"\sum_{n=1}^{100} n = 5050"),
    ("5050", r"x = \sum_{n=1}^{100} n = 5050"),
    (r"\int_0^1 x^2 dx", r"\int_0^1 x^2 \, dx"),
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"),
    (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^{n} k"),  # not a number
]


def test_compare_grants_calculations_next_to_their_result_or_in_the_gold_answer():
    assert _accepted(_LEFT_TO_DO) == _LEFT_TO_DO


# Pairs that a reward has to tell apart, or to take for one.
_SETS = {
    r"\emptyset": ([r"\varnothing", "∅", r"\{\}"], [r"\{\emptyset\}", "0", r"\{0\}"]),
    r"\varnothing": ([r"\emptyset", r"\{\}"], [r"\{0\}", "0", r"\{\varnothing\}"]),
    r"\{A, B\}": (
        [r"\{B, A\}", "A, B", r"\{\text{A}, \text{B}\}", r"\text{A and B}", r"\{a, b\}", r"\left\{B, A\right\}"],
        [r"\{A, C\}", r"\{A, B, C\}", "(A, B)", r"\{AB\}", "A", r"\{A\}"],
    ),
    "A, C": (
        ["C, A", r"\text{A, C}", r"\text{A and C}", "A and C", "(A), (C)", r"\text{(A)} \text{ and } \text{(C)}"],
        ["A, D", "A", "A, C, D", r"\text{A, D}", "CA"],
    ),
    r"\text{A, B, and D}": (["A, B, D", r"D, B, A", r"\{A, B, D\}"], ["A, B", "A, B, C", "ABC"]),
    "(3, \\infty)": (
        [
            r"\{x \mid x > 3\}",
            r"\{x : x > 3\}",
            r"\{x | x > 3\}",
            r"\{x \in \mathbb{R} \mid x > 3\}",
            r"\{x\in\mathbb R : 3 < x\}",
            r"\left\{t \,\middle|\, t > 3\right\}",
            r"\{x \text{ such that } x > 3\}",
            "x > 3",
        ],
        [
            r"\{x \mid x \ge 3\}",
            r"\{x \mid x < 3\}",
            r"\{x \mid y > 3\}",
            r"\{x \in \mathbb{Z} \mid x > 3\}",
            r"\{x \in \mathbb{N} : x > 3\}",
            r"\{x > 3\}",
            r"\{x \mid x > 3, x < 5\}",
        ],
    ),
    "[1, 2)": (
        [r"\{x \mid 1 \le x < 2\}", r"\{x \mid x \ge 1 \text{ and } x < 2\}", r"\{x : x \in [1, 2)\}"],
        [r"\{x \mid 1 \le x \le 2\}", r"\{1, 2\}", r"\{x \mid x \ge 1 \text{ or } x < 2\}"],
    ),
    "(1, 2)": ([r"\{x \mid 1 < x < 2\}", r"\{x \in \mathbb{R} : 1 < x < 2\}"], ["1 < x < 2", r"\{1, 2\}"]),
    r"\{x \mid 1 < x < 2\}": (["(1, 2)", "1 < x < 2", r"\{y : 1 < y < 2\}"], ["[1, 2]", "(1, 3)", r"\{1, 2\}", "1, 2"]),
    r"(-\infty, 1) \cup (2, \infty)": (
        [r"\{x \mid x < 1 \text{ or } x > 2\}", r"\{x : x > 2 \lor x < 1\}"],
        [r"\{x \mid x < 1 \text{ and } x > 2\}", r"\{x \mid 1 < x < 2\}", r"\{x \mid x < 1 \text{ or } x \ge 2\}"],
    ),
    r"(-\infty, 3) \cup (3, \infty)": ([r"\{x \mid x \neq 3\}", r"x \neq 3"], [r"\{x \mid x = 3\}"]),
    r"\{1, 2\}": ([r"\{x \mid x = 1 \text{ or } x = 2\}"], [r"\{x \mid 1 \le x \le 2\}"]),
    "3": (["x = 3"], [r"\{x \mid x = 3\}"]),
    r"(-2, 2)": ([r"\{x : |x| < 2\}"], [r"\{x : |x| \le 2\}"]),
}
_VARIABLES = {
    "N = n": (["n = N", "N=n", "n"], ["N = n + 1", "N=n+1", "N = 2n", "N = n^2", "N", "n + 1", "n = n"]),
    "P = p^2": (["P=p^2", "p^2", r"P = p \cdot p"], ["P = p^2 + 1", "P = p", "P^2", "p = p^2"]),
    "n": (["N = n"], ["N = n + 1", "n + 1"]),
    "n + 1": (["N = n + 1"], ["N = n", "N = n + 2"]),
    r"\frac{GMm}{r}": ([r"\frac{GmM}{r}", r"G \frac{Mm}{r}"], [r"\frac{Gm^2}{r}", r"\frac{GM^2}{r}"]),
    r"\pi Rr": ([r"\pi rR"], [r"\pi r^2", r"\pi R^2"]),
    "N = 18": (["N=18", "18"], ["N = 19", "N = 18 + 1"]),
    "AB = 2a": (["2a", "AB = a + a"], ["AB = 2a + 1"]),
    "xy": (["yx", r"y \cdot x", "y x", r"x \cdot y"], ["x + y", "x y^2", "xz", r"\text{yx}"]),
    "abc": (["cab", "bca", "a b c"], ["ab", "abd", "abcc"]),
    "mn": (["nm"], ["m", "mm", "m+n"]),
    "2xy": (["2yx", r"2 y x", "xy + yx"], ["xy", "3yx"]),
    "f(x)": ([], ["x(f)"]),
    "no": ([], ["on"]),
    "ABC": ([], ["CBA"]),
}


@pytest.mark.parametrize("table", [_SETS, _VARIABLES])
def test_sets_and_variables(table):
    right = [(gold, answer) for gold, (answers, _) in table.items() for answer in answers]
    wrong = [(gold, answer) for gold, (_, answers) in table.items() for answer in answers]
    assert _accepted(right + wrong) == right


_GRANTED = [
    ("18 km", "18 m"),  # units are not compared
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    ("18", "2x + 1 = 18"),  # the last side of an equation
    ("18", r"20 - 2"),  # an unfinished calculation
    ("(1, 2)", "1, 2"),
]


def test_compare_grants_these_loose_readings():
    assert _accepted(_GRANTED) == _GRANTED


def test_kinds_of_answers():
    right = [(gold, answer) for gold, answers in RIGHT.items() for answer in answers]
    assert _accepted(right) == right
    assert _accepted([(gold, answer) for gold, answers in WRONG.items() for answer in answers]) == []


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
