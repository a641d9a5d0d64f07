"""Formulas in a model's answer: their value, whether they are an expanded polynomial, and what their derivative is.

Nothing is evaluated as Python. Only numbers, names, `+ - * / **`, parentheses and elementary functions are read, from
Python's syntax tree, in time that is bounded by the length of the text.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple, TypeVar

#: The longest text that is read; an answer with more characters is wrong.
MAX_CHARACTERS = 1000

# A word that begins with a digit is a number without letters: Python would warn of `1if`.
_FORMULA = re.compile(r"(?!.*\b\d\w*[A-Za-z_])[\w+\-*/.() ]*", re.ASCII)
_INTEGER = re.compile(r"\d+", re.ASCII)
_LARGEST_EXPONENT = 999
_MOST_BITS = 4000  # of an integer in a coefficient

# An antiderivative is compared with the integrand at these points.
_POINTS = (0.37 + 0.21j, 0.53 - 0.17j, 0.71 + 0.34j, 0.83 - 0.29j, 1.09 + 0.13j)
_RELATIVE_TOLERANCE = 1e-9

T = TypeVar("T")


def evaluate(
    text: str,
    leaf: Callable[[int | float | str], T],
    operators: Mapping[type[ast.operator], Callable[[T, T], T]],
    functions: Mapping[str, Callable[[T], T]] | None = None,
    *,
    most: int = MAX_CHARACTERS,
) -> T:
    """Evaluates a formula.

    Args:
        text: The formula, in Python's notation.
        leaf: The value of a number or of a name.
        operators: The binary operators that may occur, among them `ast.Sub`.
        functions: The functions of one argument that may occur, by name.
        most: The most characters that are read.

    Raises:
        ValueError: If the text is no formula with these operators and functions.
        ArithmeticError: If a value is not defined, or too large.
    """
    text = text.strip()
    if len(text) > most or not _FORMULA.fullmatch(text):
        raise ValueError(f"no formula: {text[:40]!r}")

    def value(node: ast.expr) -> T:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return leaf(number)
            case ast.Name(id=name):
                return leaf(name)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return operators[ast.Sub](leaf(0), value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in (functions or {}):
                return (functions or {})[name](value(argument))
        raise ValueError(f"no formula: {text[:40]!r}")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (MemoryError, RecursionError, SyntaxError) as error:  # of deep nesting
        raise ValueError(f"no formula: {text[:40]!r}") from error


def _number(leaf: int | float | str) -> Fraction:
    if not isinstance(leaf, int):
        raise ValueError(f"no integer: {leaf!r}")
    return Fraction(leaf)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def uses_numbers(answer: str, numbers: list[int], target: int) -> bool:
    """Whether a formula has exactly the value `target`, and contains each of the numbers once and no other."""
    value = evaluate(answer, _number, _ARITHMETIC)
    return value == target and sorted(map(int, _INTEGER.findall(answer))) == sorted(numbers)


#: A polynomial with integer exponents: the coefficient of each monomial, which is its names with their exponents.
Polynomial = dict[frozenset[tuple[str, int]], Fraction]


def _leaf(leaf: int | float | str) -> Polynomial:
    if isinstance(leaf, str):
        return {frozenset({(leaf, 1)}): Fraction(1)}
    return _summed({frozenset(): _number(leaf)})


def _summed(*terms: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for polynomial in terms:
        for monomial, coefficient in polynomial.items():
            total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    total = {monomial: coefficient for monomial, coefficient in total.items() if coefficient}
    _check_digits(total)
    return total


def _constant(polynomial: Polynomial) -> Fraction | None:
    return polynomial.get(frozenset(), Fraction(0)) if polynomial.keys() <= {frozenset()} else None


def _check_digits(polynomial: Polynomial, times: int = 1) -> None:
    if any(times * n.bit_length() > _MOST_BITS for x in polynomial.values() for n in x.as_integer_ratio()):
        raise OverflowError("a coefficient of too many digits")


def _product(first: Polynomial, second: Polynomial) -> Polynomial:
    if max(len(first), len(second)) > 1 and _constant(first) is None and _constant(second) is None:
        raise ValueError("a product that was not expanded")
    product: Polynomial = {}
    for one, a in first.items():
        for other, b in second.items():
            exponents = dict(one)
            for name, exponent in other:
                exponents[name] = exponents.get(name, 0) + exponent
            product[frozenset((name, exponent) for name, exponent in exponents.items() if exponent)] = a * b
    _check_digits(product)
    return product


def _quotient(first: Polynomial, second: Polynomial) -> Polynomial:
    divisor = _constant(second)
    if divisor is None:
        raise ValueError("a division by a polynomial")
    return _product(first, {frozenset(): 1 / divisor})


def _power(base: Polynomial, exponent: Polynomial) -> Polynomial:
    times = _constant(exponent)
    if times is None or times.denominator > 1 or not 0 <= times <= _LARGEST_EXPONENT or len(base) > 1:
        raise ValueError("a power that was not expanded")
    _check_digits(base, int(times))
    return {
        frozenset((name, power * int(times)) for name, power in monomial if times): coefficient ** int(times)
        for monomial, coefficient in base.items()
    }


_POLYNOMIALS: dict[type[ast.operator], Callable[[Polynomial, Polynomial], Polynomial]] = {
    ast.Add: _summed,
    ast.Sub: lambda first, second: _summed(first, {monomial: -x for monomial, x in second.items()}),
    ast.Mult: _product,
    ast.Div: _quotient,
    ast.Pow: _power,
}


def is_expanded(answer: str, polynomial: str) -> bool:
    """Whether a formula is an expanded polynomial, and equal to another."""
    most = max(MAX_CHARACTERS, 2 * len(polynomial))
    found, wanted = (evaluate(text, _leaf, _POLYNOMIALS, most=most) for text in (answer, polynomial))
    return found == wanted


class _Dual(NamedTuple):
    """A value and its derivative."""

    value: complex
    slope: complex

    def times(self, other: _Dual) -> _Dual:
        return _Dual(self.value * other.value, self.value * other.slope + self.slope * other.value)

    def inverse(self) -> _Dual:
        return _Dual(1 / self.value, -self.slope / self.value**2)

    def power(self, other: _Dual) -> _Dual:
        if other.slope == 0:
            if self.value == 0:
                raise ZeroDivisionError("a power of 0")
            value = self.value**other.value
            return _Dual(value, other.value * value / self.value * self.slope)
        return _exp(_log(self).times(other))


def _function(value: Callable[[complex], complex], slope: Callable[[complex], complex]) -> Callable[[_Dual], _Dual]:
    return lambda x: _Dual(value(x.value), slope(x.value) * x.slope)


_exp, _log = _function(cmath.exp, cmath.exp), _function(cmath.log, lambda z: 1 / z)
_FUNCTIONS = {
    "exp": _exp,
    "log": _log,
    "ln": _log,
    "sqrt": _function(cmath.sqrt, lambda z: 0.5 / cmath.sqrt(z)),
    "sin": _function(cmath.sin, cmath.cos),
    "cos": _function(cmath.cos, lambda z: -cmath.sin(z)),
    "tan": _function(cmath.tan, lambda z: 1 / cmath.cos(z) ** 2),
    "asin": _function(cmath.asin, lambda z: 1 / cmath.sqrt(1 - z**2)),
    "acos": _function(cmath.acos, lambda z: -1 / cmath.sqrt(1 - z**2)),
    "atan": _function(cmath.atan, lambda z: 1 / (1 + z**2)),
}
_DUALS: dict[type[ast.operator], Callable[[_Dual, _Dual], _Dual]] = {
    ast.Add: lambda a, b: _Dual(a.value + b.value, a.slope + b.slope),
    ast.Sub: lambda a, b: _Dual(a.value - b.value, a.slope - b.slope),
    ast.Mult: _Dual.times,
    ast.Div: lambda a, b: a.times(b.inverse()),
    ast.Pow: _Dual.power,
}


def is_antiderivative(answer: str, integrand: str, variable: str) -> bool:
    """Whether the derivative of a formula with respect to a variable is the integrand; other names are constants."""
    for point in _POINTS:
        named = {variable: _Dual(point, 1), "pi": _Dual(math.pi, 0), "E": _Dual(math.e, 0)}

        def leaf(leaf: int | float | str, named: dict[str, _Dual] = named) -> _Dual:
            if isinstance(leaf, str):
                return named.setdefault(leaf, _Dual(cmath.rect(1.7, len(named)), 0))
            return _Dual(complex(leaf), 0)

        found = evaluate(answer, leaf, _DUALS, _FUNCTIONS).slope
        wanted = evaluate(integrand, leaf, _DUALS, _FUNCTIONS).value
        # Not "greater", which is false for NaN.
        if not abs(found - wanted) <= _RELATIVE_TOLERANCE * abs(wanted):
            return False
    return True
