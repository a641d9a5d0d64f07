"""math-verify's judgement of two answers, with guards against meanings that it only reads into them.

It runs in a separate process (`worker.py`), where time and memory are bounded.
"""

import re
from typing import Any, NamedTuple

from math_verify import parse, verify
from math_verify.grader import is_equation, take_last_relation
from math_verify.parser import LatexExtractionConfig
from sympy import (
    And,
    Basic,
    Derivative,
    Eq,
    Expr,
    FiniteSet,
    Integral,
    Intersection,
    Interval,
    Limit,
    MatrixBase,
    Product,
    Set,
    Sum,
    Tuple,
    Union,
)
from sympy.core.relational import Relational
from sympy.parsing import sympy_parser

# Only boxes: an answer's text is not searched for phrases or numbers.
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]

_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?\d+\s*\}|\d)")
_NUMBER_OR_NAME = re.compile(r"[\w.+-]*", re.ASCII)
_DIGIT = re.compile(r"\d")

_LAYOUT = re.compile(r"\\(?:(?:left|right|middle)(?![a-zA-Z])|[,;:! ])")
_SET_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*(?:\{R\}|R)\s*)?"
    r"(?:\\mid(?![a-z])|\\vert(?![a-z])|\\colon(?![a-z])|[:|]|\\text\s*\{\s*such that\s*\})(.*)\\\}"
)
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])")
_AND = re.compile(r"\\text\s*\{\s*and\s*\}|\\(?:land|wedge)(?![a-z])")

# Calculations that an answer leaves to do.
_UNEVALUATED = (Sum, Product, Integral, Limit, Derivative)

# math-verify rounds to six decimals, so that 1e-8 equals 0; below this, relative differences count.
_SMALL = 0.1
_RELATIVE_TOLERANCE = 1e-5


class _Side(NamedTuple):
    """One of the two answers."""

    text: str  # of a set-builder, only its condition
    parsed: list[Any]  # the expression, where there is one, and then the text that it was read from
    is_set_builder: bool

    @property
    def value(self) -> Any:
        return self.parsed[0]


def is_equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the answer for the gold answer, and no guard objects."""
    expected, given = _read(gold), _read(answer)
    if _restates(expected.value, given.value) or not verify(
        expected.parsed,
        given.parsed,
        timeout_seconds=None,
        allow_set_relation_comp=expected.is_set_builder or not _may_be_a_point(expected.value),
    ):
        return False
    return not (
        _drops_a_number(given)
        or _is_a_set_instead(expected, given)
        or _contradicts(expected.value, given.value)
        or ("%" not in gold + answer and _rounds_away(expected.value, given.value))
    )


def forbid_code() -> None:
    """Bounds what sympy may evaluate as Python to numbers and names, for the rest of the process.

    sympy turns strings into expressions with `eval`. math-verify passes it only the number tokens of its LaTeX lexer,
    and this function makes sure of that.
    """
    parse_expr = sympy_parser.parse_expr

    def checked(text: str, *arguments: Any, **options: Any) -> Any:
        if not _NUMBER_OR_NAME.fullmatch(text.strip()):  # math-verify passes the "50 " of `50 \%`
            raise PermissionError("sympy was about to evaluate what is neither a number nor a name")
        return parse_expr(text, *arguments, **options)

    sympy_parser.parse_expr = checked


def _read(text: str) -> _Side:
    r"""Parses an answer; of `\{x \mid x > 3\}`, what is between its bar and its brace becomes the set."""
    builder = _SET_BUILDER.fullmatch(_LAYOUT.sub("", text))
    if builder:
        solutions = _solutions(builder[2], builder[1].lower())
        if solutions is not None:
            return _Side(builder[2], [solutions, builder[2]], True)
    return _Side(text, _parse(text), False)


def _solutions(condition: str, variable: str) -> Set | None:
    """The real numbers that fulfil a condition; None if it has anything but relations in the one variable."""
    for connective, combine in ((_OR, Union), (_AND, Intersection)):
        parts = connective.split(condition)
        if len(parts) > 1:
            sets = [_solutions(part, variable) for part in parts]
            return None if None in sets else combine(*sets)
    relation = _parse(condition)[0]
    if not isinstance(relation, And | Relational) or {symbol.name for symbol in relation.free_symbols} != {variable}:
        return None
    # math-verify reads x \in [0, 1] as an equation.
    return relation.rhs if isinstance(relation, Eq) and isinstance(relation.rhs, Set) else relation.as_set()


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(
        rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, extraction_mode="first_match", parsing_timeout=None
    )
    return parsed


def _restates(gold: Any, answer: Any) -> bool:
    r"""Whether an answer leaves a sum, an integral or the like to do, where the gold answer is one or several numbers.

    As `\sum_{n=1}^{100} n` does for 5050, which may be no more than the question again.
    """
    if any(not isinstance(side, Basic | MatrixBase) for side in (gold, answer)):
        return False
    if any(value.free_symbols for value in _values(gold)):
        return False
    return any(value.has(kind) for value in _values(answer) for kind in _UNEVALUATED if not gold.has(kind))


def _values(expression: Any) -> list[Any]:
    """The value of an expression, or of each member of a set, without the name before an equals sign."""
    parts = expression.args if isinstance(expression, FiniteSet) else (expression,)
    return [take_last_relation(part).rhs if is_equation(part) else part for part in parts]


def _drops_a_number(answer: _Side) -> bool:
    r"""Whether digits were taken for a part of a unit, as in `18 \text{ or 20}`; `\text{cm}^2` is a unit."""
    before, after = (len(_DIGIT.findall(_EXPONENT.sub("", text))) for text in (answer.text, answer.parsed[-1]))
    return after < before


def _may_be_a_point(gold: object) -> bool:
    """Whether a gold answer such as `(1, 2)` may be a pair, which is no solution of `1 < x < 2`."""
    return isinstance(gold, Interval) and gold.is_open and not (gold.start.is_infinite or gold.end.is_infinite)


def _is_a_set_instead(gold: _Side, answer: _Side) -> bool:
    r"""Whether `\{18\}` or `[18, 18]` stands for 18, or one of `\{1, 2\}` and `(1, 2)` for the other.

    To sympy, `{18}` and `18, 18` are sets as well.
    """
    if isinstance(gold.value, Expr):
        return isinstance(answer.value, Set) and (answer.is_set_builder or r"\{" in answer.text or "[" in answer.text)
    return any(
        (isinstance(one.value, Interval | Tuple) and r"\{" in other.text and r"\{" not in one.text)
        or (isinstance(one.value, Interval) and one.is_set_builder and isinstance(other.value, FiniteSet))
        for one, other in ((gold, answer), (answer, gold))
    )


def _contradicts(gold: Any, answer: Any) -> bool:
    """Whether an answer such as `17 = 18` or `x = 17 = 18` names a second number: math-verify reads only the last."""
    if not is_equation(answer) or is_equation(gold):
        return False
    relations = answer.args if isinstance(answer, And) else [answer]
    sides = [side for relation in relations if isinstance(relation, Eq) for side in relation.args]
    return any(not verify(gold, side, timeout_seconds=None) for side in sides if _is_number(side))


def _rounds_away(gold: Any, answer: Any) -> bool:
    """Whether two numbers count as equal only because both are small."""
    if not (_is_number(gold) and _is_number(answer)):
        return False
    magnitudes = [abs(number).evalf(20) for number in (gold, answer)]
    if min(magnitudes) >= _SMALL:
        return False
    return bool(abs(gold - answer).evalf(20) > _RELATIVE_TOLERANCE * max(magnitudes))


def _is_number(expression: object) -> bool:
    return isinstance(expression, Basic) and bool(getattr(expression, "is_number", False))
