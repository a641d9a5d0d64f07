import pytest

from troll.tasks.formulas import is_antiderivative, is_expanded, uses_numbers


def test_uses_numbers_is_exact_and_takes_each_number_once() -> None:
    assert uses_numbers(" (8 / 3 - 8/3 + 1)*24", [8, 3, 8, 3, 1, 24], 24)
    assert uses_numbers("8/(3 - 8/3)", [3, 3, 8, 8], 24)
    assert not uses_numbers("8/(3 - 8/3)", [3, 8, 8, 8], 24)
    assert not uses_numbers("4*6 + 1/2", [4, 6, 1, 2], 24)  # reasoning-gym rounds it down
    assert not uses_numbers("1000*1000/1000", [1000, 1000, 1000], 999)
    for other in ("4*6*1.0", "4*6**1", "4*6//1", "4*6%7"):
        with pytest.raises(ValueError, match=r"no formula|no integer"):
            uses_numbers(other, [4, 6, 1], 24)


def test_is_expanded_compares_polynomials() -> None:
    assert is_expanded("2*x*y - -3*x**2*y/6 + (1 + 1)*(x - 1)", "x**2*y/2 + 2*x*y + 2*x - 2")
    assert is_expanded("x - x", "0")
    assert not is_expanded("x**2*y", "x*y**2")
    assert not is_expanded("x**2", "X**2")
    for unexpanded in ("(x + 1)*(x - 1)", "x*(x + 1)", "(x + 1)**2", "1/x", "x**y", "x**-1"):
        with pytest.raises(ValueError, match=r"not expanded|division by"):
            is_expanded(unexpanded, "x**2 - 1")


@pytest.mark.parametrize(
    ("answer", "integrand", "right"),
    [
        ("x**3/3 + C", "x**2", True),
        ("x**3/3 + K - 7*pi", "x**2", True),
        ("0.333333*x**3", "x**2", False),
        ("x**3/3 + K*x", "x**2", False),
        ("x**3/3 + C", "X**2", False),
        ("log(x)**2/2", "log(x)/x", True),
        ("ln(2*x)", "1/x", True),
        ("E**(2*x)/2", "exp(2*x)", True),
        ("2**x/ln(2)", "2**x", True),
        ("x**x", "x**x*(log(x) + 1)", True),
        ("-2*(1 - x)**(3/2)/3", "sqrt(1 - x)", True),
        ("x*asin(3*x) + sqrt(1 - 9*x**2)/3", "asin(3*x)", True),
        ("x*acos(x) - sqrt(1 - x**2)", "acos(x)", True),
        ("x*atan(x) - log(1 + x**2)/2", "atan(x)", True),
        ("-log(cos(x))", "tan(x)", True),
        ("tan(x)", "1/cos(x)**2", True),
        ("exp(x)*(sin(x) - cos(x))/2", "exp(x)*sin(x)", True),
        ("exp(x)*(sin(x) + cos(x))/2", "exp(x)*sin(x)", False),
    ],
)
def test_is_antiderivative(answer: str, integrand: str, right: bool) -> None:
    assert is_antiderivative(answer, integrand, "x") == right
