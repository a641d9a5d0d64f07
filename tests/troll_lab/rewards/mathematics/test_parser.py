"""Answers that math-verify's parser would misread, and the check that it still has the methods that are corrected."""

import pytest
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

from tests.troll_lab.rewards.mathematics.kinds import accepted
from troll_lab.rewards.mathematics.parser import _NEEDED, check_parser

RIGHT = [
    (r"\sin x\cos x", r"\sin x \cdot \cos x"),
    (r"2\sin x\cos x", r"2 \sin x \cdot \cos x"),
    ("2", r"\log_2 3 \cdot \log_3 4"),
    (r"\ln 2\ln 3", r"\ln 2 \cdot \ln 3"),
    (r"r\cos\theta", r"\cos\theta \cdot r"),
    (r"x\ln x", r"\ln x \times x"),
    (r"\sqrt x\ln x", r"\ln x \cdot \sqrt x"),
    (r"3\log_2 5", r"\log_2{5} \cdot 3"),
    (r"\frac{\ln 2}{\ln 3}", r"\ln 2/\ln 3"),
    (r"\frac{\ln 2}{\ln 3}", r"\log 2/\log 3"),
    (r"\frac{\ln 5}{\ln 2}", r"\ln 5 \div \ln 2"),
    (r"\frac{\sin x}{\cos x}", r"\sin x/\cos x"),
    (r"\frac12\ln|x|+C", r"\ln|x|/2 + C"),
    (r"\frac{\log_2 5}{2}", r"\log_2{5}/2"),
    (r"\frac12", r"\sin \pi/6"),
    (r"\frac12", r"\sin\frac\pi6"),
    (r"\frac{3\pi}2", r"1\frac12\pi"),
    (r"\frac{5x}2", r"2\frac12x"),
    (r"\frac{5\sqrt2}2", r"2\frac12\sqrt2"),
    (r"\sqrt3d", r"d\sqrt3"),
    (r"d\sin\theta", r"\sin(\theta)d"),
    (r"\frac d2", r"d\frac12"),
    (r"\pi d", r"d\pi"),
    ("ad", "da"),
    (r"\pi d h", r"\pi h d"),
    ("ad-bc", "da-cb"),
    (r"y=\frac23(x-1)", "y = 2/3(x - 1)"),
    (r"\frac{x+1}2", "1/2(x+1)"),
    (r"\frac12\ln3", "1/2 ln(3)"),
    (r"\frac12|x|", "1/2|x|"),
    (r"\frac12\sin x", r"1/2 \sin x"),
    (r"50\%", r"100\%-50\%"),
    (r"25\%", r"20\%+5\%"),
    (r"\frac12", r"\frac12 = 50\%"),
    ("0.5", r"x = 50\%"),
    (r"50\%", r"x = 0.5 = 50\%"),
    ("x=1, y=2", "1, 2"),
    ("x=1, y=2", "y=2, x=1"),
    ("x=1, x=2", "2, 1"),
    ("1, 2", "x=2, x=1"),
    (r"1:(1+\sqrt2)", r"1:1+\sqrt2"),
    (r"\frac34", "3:4"),
    ("rt", "tr"),
    ("e^{rt}", "e^{tr}"),
    (r"\csc x", r"\cosec x"),
    ("(1+r)^T", "(r+1)^T"),
    ("2^T", "2^{T}"),
    (r"m+n-\gcd(m,n)", r"n+m-\gcd(m,n)"),
    ("6", r"\gcd(12,18)"),
    (r"\gcd(m,n)", r"\gcd(n,m)"),
    ("x > 2", "2 < x"),
    (r"(1,\infty)", "x>1"),
    ("-1<x<3", r"x > -1 \text{ and } x < 3"),
    ("2x+1<6", "1+2x<6"),
    (r"\{x \mid x > 3\}", r"(3,\infty)"),
    (r"\frac{dy}{dx}", r"\frac{dy}{dx}"),
    ("2d", r"d \cdot 2"),
    (r"\int_0^1 f(x) dx", r"\int_0^1 f(x) \, dx"),
    (r"10^{-2}\%", r"0.01\%"),
    (r"\pm 3", "3, -3"),
    (r"\{1,-1,2,-2\}", r"\{\pm 1, \pm 2\}"),
    ("d^2", r"d \cdot d"),
    (r"\frac{v^2}{2d}", r"\frac{v^2}{2 d}"),
    ("5!", "120"),
    ("x_{2}^{2}", "x_2^2"),
    ("e^{2x}", "e^{2x}"),
    (r"\frac{\ln x}{x}", r"\ln(x)/x"),
    (r"\frac{\ln x}{x}", r"\frac{1}{x} \ln x"),
    (r"\tan^{-1} x", r"\arctan x"),
    (r"3-\ln 2", r"3 - \ln 2"),
    (r"\text{odd}", "odd"),
    ("d^2x^2", "(dx)^2"),
    ("dx^2", "x^2 d"),
    (r"1, \sqrt3", r"1 and \sqrt{3}"),
]

WRONG = [
    (r"\ln 6", r"\ln 2 \cdot 3"),
    (r"\ln 6", r"\ln{2} \cdot 3"),
    (r"\log_2 10", r"\log_2 5 \times 2"),
    (r"\ln(2\sin 1)", r"\ln 2 \cdot \sin 1"),
    (r"\sin(xe^x)", r"\sin x \cdot e^x"),
    (r"\sin(xy)", r"\sin x \cdot y"),
    (r"\ln 3", r"\ln 6 / 2"),
    ("0", r"\ln 2 / 2"),
    (r"\ln\frac32", r"\ln 3/2"),
    (r"\sin^3(\frac x3)", r"\sin^3 x/3"),
    (r"\ln(3x)", r"\ln{3} x"),
    (r"\sin(xy)", r"\sin{x} y"),
    (r"\cos(2\theta)", r"\cos{2} \theta"),
    (r"\sin(\frac x2)", r"\sin{x}/2"),
    (r"\frac\pi2", r"1\frac12\pi"),
    (r"\frac x2", r"1\frac12x"),
    ("x", r"2\frac12x"),
    (r"\sqrt2", r"2\frac12\sqrt2"),
    (r"2\frac12x", "x"),
    ("2^T", "2"),
    ("2", "2^T"),
    ("(1+r)^T", "1+r"),
    ("P(1+r)^T", "P(1+r)"),
    ("e^{T}", "e"),
    (r"\frac1{1+e^T}", r"\frac1{1+e}"),
    ("x_2", "x_{2}^{T}"),
    ("A", "A^T"),
    ("6", "6^T"),
    ("a^Tb", "ab"),
    (r"2d\sin\theta", r"d\sin 2\theta"),
    (r"2d\cos\theta", r"d\cos2\theta"),
    (r"d\ln 2x", r"2d\ln x"),
    (r"m+n-\gcd(m,n)", "m+n-1"),
    ("mn", r"\frac{mn}{\gcd(m,n)}"),
    (r"\gcd(m,n)", r"\gcd(m,2n)"),
    ("1", r"\gcd(a,b)"),
    (r"\frac1{2(x+1)}", "1/2(x+1)"),
    (r"\frac1{2\ln3}", r"1/2 \ln 3"),
    (r"\frac1{2\sin x}", "1/2 sin(x)"),
    ("64", "2**3**2"),
    ("x^6", "x^2^3"),
    ("80", "10{8}"),
    ("6", "2{3}"),
    ("d^2x^2", "dx^2"),
]


def test_right_answers_are_read() -> None:
    assert accepted(RIGHT) == RIGHT


def test_wrong_answers_are_not_read_as_right_ones() -> None:
    assert accepted(WRONG) == []


@pytest.mark.parametrize("name", _NEEDED)
@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_check_parser_names_a_method_that_has_changed(name: str, change: str) -> None:
    methods = {each: getattr(_Latex2Sympy, each) for each in _NEEDED}
    if change == "gone":
        del methods[name]
    else:
        methods[name] = lambda self: None
    if name == "__init__" and change == "gone":  # every class has one
        methods[name] = object.__init__
    with pytest.raises(ImportError, match=rf"lacks {name}\(.*\): pip install latex2sympy2_extended=="):
        check_parser(type("Parser", (), methods))
