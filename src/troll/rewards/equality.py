"""math-verify's judgement of two answers, less what it reads into them.

Runs in a process of its own (`equivalence_worker.py`), where time and memory are bounded.
"""

import re
from typing import Any

from math_verify import parse, verify
from math_verify.grader import is_equation
from math_verify.parser import LatexExtractionConfig
from sympy import And, Basic, Eq, Expr, Interval, Set, Tuple
from sympy.parsing import sympy_parser

# Boxes alone: an answer's text is not searched for phrases or numbers.
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]

_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?\d+\s*\}|\d)")
_NUMBER_OR_NAME = re.compile(r"[\w.+-]*", re.ASCII)
_DIGIT = re.compile(r"\d")

# math-verify rounds to six decimals, so that 1e-8 equals 0; below this, relative differences count.
_SMALL = 0.1
_RELATIVE_TOLERANCE = 1e-5


def is_equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the answer for the gold answer, and nothing in it speaks against that."""
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if not verify(
        parsed_gold,
        parsed_answer,
        timeout_seconds=None,
        allow_set_relation_comp=not _may_be_a_point(parsed_gold[0]),
    ):
        return False
    return not (
        _drops_a_number(answer, parsed_answer)
        or _is_a_set_instead(gold, parsed_gold, answer, parsed_answer)
        or _contradicts(parsed_gold, parsed_answer)
        or ("%" not in gold + answer and _rounds_away(parsed_gold, parsed_answer))
    )


def forbid_code() -> None:
    """Bounds what sympy may evaluate as Python to numbers and names, for the rest of the process.

    sympy turns strings into expressions with `eval`. math-verify hands it the number tokens of its LaTeX lexer alone;
    this keeps it so.
    """
    parse_expr = sympy_parser.parse_expr

    def checked(text: str, *arguments: Any, **options: Any) -> Any:
        if not _NUMBER_OR_NAME.fullmatch(text.strip()):  # math-verify passes the "50 " of `50 \%`
            raise PermissionError("sympy was about to evaluate what is neither a number nor a name")
        return parse_expr(text, *arguments, **options)

    sympy_parser.parse_expr = checked


def _parse(text: str) -> list[Any]:
    """The expression, where there is one, and then the text that it was read from."""
    parsed: list[Any] = parse(
        rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, extraction_mode="first_match", parsing_timeout=None
    )
    return parsed


def _drops_a_number(answer: str, parsed: list[Any]) -> bool:
    r"""Whether digits were taken for a part of a unit, as in `18 \text{ or 20}`; `\text{cm}^2` is a unit."""
    before, after = (len(_DIGIT.findall(_EXPONENT.sub("", text))) for text in (answer, parsed[-1]))
    return after < before


def _may_be_a_point(gold: object) -> bool:
    """Whether a gold answer such as `(1, 2)` may be a pair, which is no solution of `1 < x < 2`."""
    return isinstance(gold, Interval) and gold.is_open and not (gold.start.is_infinite or gold.end.is_infinite)


def _is_a_set_instead(gold: str, parsed_gold: list[Any], answer: str, parsed_answer: list[Any]) -> bool:
    r"""Whether `\{18\}` or `[18, 18]` stands for 18, or one of `\{1, 2\}` and `(1, 2)` for the other.

    To sympy, `{18}` and `18, 18` are sets as well.
    """
    if isinstance(parsed_gold[0], Expr):
        return isinstance(parsed_answer[0], Set) and (r"\{" in answer or "[" in answer)
    sides = [(parsed_gold[0], gold, answer), (parsed_answer[0], answer, gold)]
    return any(
        isinstance(parsed, Interval | Tuple) and r"\{" in other and r"\{" not in own for parsed, own, other in sides
    )


def _contradicts(gold: list[Any], answer: list[Any]) -> bool:
    """Whether an answer such as `17 = 18` or `x = 17 = 18` names a second number: math-verify reads the last alone."""
    if not is_equation(answer[0]) or is_equation(gold[0]):
        return False
    relations = answer[0].args if isinstance(answer[0], And) else [answer[0]]
    sides = [side for relation in relations if isinstance(relation, Eq) for side in relation.args]
    return any(not verify(gold[0], side, timeout_seconds=None) for side in sides if _is_number(side))


def _rounds_away(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two numbers count as equal only because both are small."""
    first, second = (item[0] for item in (gold, answer))
    if not (_is_number(first) and _is_number(second)):
        return False
    magnitudes = [abs(number).evalf(20) for number in (first, second)]
    if min(magnitudes) >= _SMALL:
        return False
    return bool(abs(first - second).evalf(20) > _RELATIVE_TOLERANCE * max(magnitudes))


def _is_number(expression: object) -> bool:
    return isinstance(expression, Basic) and bool(getattr(expression, "is_number", False))
