"""Compares two answers: parsed by math-verify, and compared exactly where their numbers are exact.

It runs in a separate process (`worker.py`), where time and memory are bounded.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random
from typing import Any

import sympy
from latex2sympy2_extended.symbols import GREEK_LETTER_MAP
from math_verify import verify
from math_verify.grader import is_assignment_relation, is_equation, take_first_relation, take_last_relation
from mpmath import mag, mpmathify
from sympy.core.function import AppliedUndef
from sympy.parsing import sympy_parser

from troll_lab.rewards.mathematics.reading import Answer, Item, read
from troll_lab.rewards.mathematics.texts import PLAIN_NUMBER

_NUMBER_OR_NAME = re.compile(r"[\w.+-]*", re.ASCII)
_SPACE = re.compile(r"(?<![\d.]) | (?![\d.])", re.ASCII)  # not in `10 18`
# Operators with a symbol of their own, which no number can replace.
_BINDING = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
# Operators that an answer may leave unevaluated.
_UNEVALUATED = (*_BINDING, sympy.Derivative)

# math-verify rounds to six decimals, so that 1e-8 equals 0; below this, relative differences count.
_SMALL = 0.1
_RELATIVE_TOLERANCE = 1e-5

# Exact values are compared to this many digits, plus twice the digits before or after the point of their largest or
# smallest part. If that exceeds the second number, they count as different.
_DIGITS = 50
_MOST_DIGITS = 20_000
_PIECEWISE = (sympy.Abs, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling)


def is_equal(gold: str, answer: str, positive_symbols: bool = False) -> bool:
    """Whether two answers are the same.

    Args:
        gold: The text of the gold answer, tidy and without its unit.
        answer: The text that is compared with it.
        positive_symbols: Whether symbols stand for positive numbers, as in physics.
    """
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    expected, given = read(gold), read(answer)
    return not _restates(expected, given) and _Comparison(expected, given, positive_symbols).is_same(expected, given)


def forbid_code() -> None:
    """Bounds what sympy may evaluate as Python to numbers and names, for the rest of the process.

    sympy turns strings into expressions with `eval`. math-verify passes it only the number tokens of its LaTeX lexer;
    this function raises PermissionError for anything else.
    """
    parse_expr = sympy_parser.parse_expr

    def checked(text: str, *arguments: Any, **options: Any) -> Any:
        if not _NUMBER_OR_NAME.fullmatch(text.strip()):  # math-verify passes the "50 " of `50 \%`
            raise PermissionError("sympy was about to evaluate something other than a number or a name")
        return parse_expr(text, *arguments, **options)

    sympy_parser.parse_expr = checked


def _restates(gold: Answer, answer: Answer) -> bool:
    r"""Whether an answer may only repeat the question.

    Such an answer is a condition that has to be solved, like `2x - 1 > 3`, or, where the gold answer has none, an
    unevaluated sum, integral or the like, such as `\sum_{n=1}^{100} n` for 5050.
    """
    is_solved, is_given_solved = (all(item.is_solved for item in side.items) for side in (gold, answer))
    if is_solved and not is_given_solved:
        return True
    kinds = [kind for kind in _UNEVALUATED if not any(item.value.has(kind) for item in gold.items)]
    return any(_unwrapped(item.value).has(*kinds) for item in answer.items)


def _unwrapped(value: Any) -> Any:
    """The value of an equation: its last side."""
    return take_last_relation(value).rhs if is_equation(value) else value


class _Comparison:
    """Compares the values of two answers.

    Args:
        gold: The gold answer. The symbols of both answers decide how their names are matched.
        answer: The answer that is compared with it.
        positive: Whether symbols stand for positive numbers.
    """

    def __init__(self, gold: Answer, answer: Answer, positive: bool) -> None:
        names = [{symbol.name for item in side.items for symbol in _symbols(item.value)} for side in (gold, answer)]
        # Either answer may have `N` for `n`, unless one of them has both.
        self._small = {name: name.lower() for side in names for name in side if len(name.split("_")[0]) == 1}
        if any(len({self._small.get(name, name) for name in side}) < len(side) for side in names):
            self._small = {}
        # Programs write E for Euler's number, and I, which `notation.py` makes `\mathcal{I}`, for the imaginary unit.
        added = names[1] - names[0]
        self._constants = {"i": sympy.I} | ({"E": sympy.E, "e": sympy.E} if "E" in added else {})
        self._constants |= {"math{I}": sympy.I} if "math{I}" in added else {}
        self._positive = positive

    def is_same(self, gold: Answer, answer: Answer) -> bool:
        """Compares as sets where the gold answer has braces, in order if one is a pair, else in any order."""
        if len(gold.items) == len(answer.items) == 1 and (gold.is_set or not answer.is_set):
            return self._is_same_item(gold.items[0], answer.items[0])
        if gold.is_set:
            pairs = [[self._is_same_item(one, other) for other in answer.items] for one in gold.items]
            return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))
        is_one = len(gold.items) == 1 or len(answer.items) == 1
        if is_one and any(isinstance(side.items[0].value, sympy.Union) for side in (gold, answer)):
            gold, answer = (_united(side) for side in (gold, answer))
            return len(gold.items) == len(answer.items) == 1 and self._is_same_item(gold.items[0], answer.items[0])
        names = [_names(side) for side in (gold, answer)]
        if is_one or (not all(names) and any(len(set(each)) > 1 for each in names)):  # `x = 1, y = 2` and `1, 2`
            sides = [_coordinates(side.items[0]) if len(side.items) == 1 else _by_name(side) for side in (gold, answer)]
            in_order = not answer.is_set and sides[0] and len(sides[0]) == len(sides[1])
            return bool(in_order) and all(map(self._is_same_item, *sides))
        left = list(answer.items)
        for expected in gold.items if len(gold.items) == len(left) else ():
            found = next((given for given in left if self._is_same_item(expected, given)), None)
            if found is None:
                return False
            left.remove(found)
        return not left

    def _is_same_item(self, gold: Item, answer: Item) -> bool:
        if PLAIN_NUMBER.fullmatch(gold.text) and PLAIN_NUMBER.fullmatch(answer.text):
            return Fraction(gold.text) == Fraction(answer.text)
        if gold.variable and answer.variable and gold.variable.lower() != answer.variable.lower():
            return False
        if answer.variable and _coordinates(gold):  # a point cannot be the solution of 1 < x < 2
            return False
        if not gold.is_percentage and not answer.is_percentage:
            return self._is_same(gold.value, answer.value)
        expected, given = _unwrapped(gold.value), _unwrapped(answer.value)
        chain = _numbers(answer.value)
        if not all(self._is_same(given, number) or self._is_same(given / 100, number) for number in chain):
            return False
        if gold.is_percentage:
            return self._is_same(expected, given) or (not answer.is_percentage and self._is_same(expected / 100, given))
        # 0.5 % may be the number 0.5, but not 1/2: of numbers below one, only decimals may lack the sign.
        is_decimal = isinstance(expected, sympy.Integer | sympy.Float)
        may_lack_sign = is_decimal or (_is_number(expected) and bool(abs(expected) >= 1))
        return self._is_same(expected, given / 100) or (may_lack_sign and self._is_same(expected, given))

    def _is_same(self, gold: Any, answer: Any) -> bool:
        if is_equation(answer):
            if self._contradicts(gold, answer):
                return False
            answer = answer if is_equation(gold) else _unwrapped(answer)
        elif is_assignment_relation(gold):
            gold = _unwrapped(gold)
        if is_assignment_relation(gold) and is_assignment_relation(answer):
            names = (take_first_relation(side).lhs for side in (gold, answer))
            if self._is_same(*names):
                return self._is_same(_unwrapped(gold), _unwrapped(answer))
        if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Set):
            return False
        expected, given = _parts(gold), _parts(answer)
        if expected and given:
            (kind, values), (other_kind, others) = expected, given
            return kind == other_kind and len(values) == len(others) and all(map(self._is_same, values, others))
        if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
            same_equation = self._is_same_equation(gold, answer)
            if same_equation is not None:
                return same_equation
        gold, answer = self._named(gold), self._named(answer)
        has_decimals = gold.has(sympy.Float) or answer.has(sympy.Float)
        if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
            exactly = self._is_same_exactly(gold, answer)
            if exactly or (exactly is False and not (has_decimals and _is_number(gold) and _is_number(answer))):
                return exactly
        same = verify(gold, answer, numeric_precision=15 if has_decimals else _DIGITS, timeout_seconds=None)
        return bool(same) and not _rounds_away(gold, answer)

    def _is_same_equation(self, gold: sympy.Eq, answer: sympy.Eq) -> bool | None:
        """Whether one equation is the other times a number; None if their solutions have to be compared.

        math-verify takes equations without real solutions for equal, and a derivative of a symbol for 0. With a sum, a
        limit or an integral, the sides are compared: it would evaluate them, and an identity would be `0 = 0`.
        """
        sides = (*gold.args, *answer.args)
        if not all(isinstance(side, sympy.Expr) for side in sides):
            return None
        if any(side.has(*_BINDING) for side in sides):
            orders = (answer.args, answer.args[::-1])
            return any(all(map(self._is_same, gold.args, order)) for order in orders)
        one, other = (self._evaluable(self._named(side.lhs - side.rhs)) for side in (gold, answer))
        point = next(self._points(sorted(one.free_symbols | other.free_symbols, key=str), 1))
        scales = one.xreplace(point), other.xreplace(point)
        if not any(self._is_same_exactly(scale, sympy.S.Zero) for scale in scales) and self._is_same_exactly(
            one * scales[1], other * scales[0]
        ):
            return True
        if any(side.has(sympy.Derivative) for side in sides):
            return False
        return None if sympy.solve(one, one.free_symbols) else False

    def _named(self, value: Any) -> Any:
        """The value with the names and the assumptions that symbols have in both answers."""
        if not isinstance(value, sympy.Basic) or value.has(*_BINDING):
            return value
        assumption = {"positive" if self._positive else "real": True}
        names = {symbol: self._small.get(symbol.name, symbol.name) for symbol in _symbols(value)}
        symbols = {symbol: sympy.Symbol(name, **assumption) for symbol, name in names.items()}
        return value.xreplace({symbol: other for symbol, other in symbols.items() if other != symbol})

    def _contradicts(self, gold: Any, answer: Any) -> bool:
        """Whether an answer such as `17 = 18` or `x = 17 = 18` names a second number: the last side is compared."""
        value = _unwrapped(gold) if is_assignment_relation(gold) else gold
        if isinstance(answer, sympy.Eq) and is_equation(gold) and value.free_symbols:
            return False  # `2x - y = -1` is the line `y = 2x + 1`
        return not is_equation(value) and any(not self._is_same(value, number) for number in _numbers(answer))

    def _is_same_exactly(self, gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
        """Compares numbers by their digits, and expressions by their values at random points.

        Returns:
            Whether they are the same; None if one cannot be evaluated.
        """
        if any(map(_is_undefined, (gold, answer))):  # 5/0 is not 3/0
            return False
        if gold == answer:
            return True
        if any(side.has(*_BINDING) or _is_word(side) for side in (gold, answer)):
            return None
        sides = [self._evaluable(side) for side in (gold, answer)]
        if any(map(_is_undefined, sides)):
            return False
        if sides[0] == sides[1] or all(side.is_Rational for side in sides):
            return bool(sides[0] == sides[1])
        symbols = sorted(sides[0].free_symbols | sides[1].free_symbols, key=str)
        is_compared = False
        count, largest = 6, 0
        if any(map(_has_pieces, sides)):
            count = 60
            largest = max((abs(number) for side in sides for number in side.atoms(sympy.Rational)), default=0)
        for point in self._points(symbols, count, beyond=largest):
            at_point = [side.xreplace(point) for side in sides]
            digits = _DIGITS + 2 * max(map(_size, at_point)) // 3
            if digits > _MOST_DIGITS:
                return False
            values = [_evaluated(side, digits) for side in at_point]
            if values[0] is None or values[1] is None:
                continue
            is_compared = True
            allowed = max(map(abs, (*values[0], *values[1]))) * sympy.Rational(1, 10 ** (digits - 10))
            if any(abs(one - other) > allowed for one, other in zip(*values, strict=True)):
                return False
        return True if is_compared else None

    def _evaluable(self, side: sympy.Expr) -> sympy.Expr:
        """The expression with symbols instead of derivatives and of undefined functions, and with real odd roots."""
        for part in sorted(side.atoms(AppliedUndef, sympy.Derivative), key=lambda part: -len(str(part))):
            side = side.xreplace({part: sympy.Symbol(str(part.func(*(argument.doit() for argument in part.args))))})
        side = side.xreplace({number: sympy.Rational(str(number)) for number in side.atoms(sympy.Float)})
        side = side.xreplace(
            {symbol: self._constants[symbol.name] for symbol in _symbols(side) if symbol.name in self._constants}
        )
        return side.doit().replace(_is_odd_root, _real_root)

    def _points(
        self, symbols: Sequence[sympy.Symbol], count: int, beyond: Any = 0
    ) -> Iterator[dict[sympy.Symbol, sympy.Rational]]:
        """Random points: with positive coordinates only, with negative ones, and with those of any sign.

        Coordinates are from a fifth to three times 1, 10, 100, 1000 or, if it is larger, `beyond`.
        """
        random = Random(0)
        scales = [1, 10, 100, 1000, *([beyond] if beyond > 1000 else [])]
        for number in range(count if symbols else 1):
            signs = [(1, -1, random.choice((1, -1)))[0 if self._positive else number % 3] for _ in symbols]
            scale = scales[number // 6 % len(scales)]
            numbers = [sign * scale * sympy.Rational(random.randint(200, 3000), 1009) for sign in signs]
            yield dict(zip(symbols, numbers, strict=True))


def _coordinates(item: Item) -> list[Item]:
    """The coordinates of a tuple, or of an open interval that may be a pair; else none."""
    value = _unwrapped(item.value) if item.may_be_a_point else None
    kind, values = _parts(value) or ("", [])
    return [Item(each) for each in values] if kind == "tuple" else []


def _parts(value: Any) -> tuple[object, list[Any]] | None:
    """The kind and the parts of a pair, an interval or a matrix."""
    if isinstance(value, sympy.Tuple):
        return "tuple", list(value.args)
    if isinstance(value, sympy.Interval):
        is_pair = value.is_open and not (value.start.is_infinite or value.end.is_infinite)
        return "tuple" if is_pair else (value.left_open, value.right_open), [value.start, value.end]
    if isinstance(value, sympy.MatrixBase):
        return value.shape, list(value.flat())
    return None


def _by_name(side: Answer) -> list[Item]:
    """The items of a list: `y = 2, x = 1` is the pair (1, 2), and `m = 2, b = 1` the pair (2, 1)."""
    names = _names(side)
    if not names:
        return side.items
    items = [item._replace(value=_unwrapped(item.value)) for item in side.items]
    by_name = {"x", "y", "z"}.issuperset(names)
    return [items[at] for at in sorted(range(len(items)), key=names.__getitem__)] if by_name else items


def _names(side: Answer) -> list[str]:
    """The names in a list of `x = 1, y = 2`; none if there is another item."""
    values = [item.value for item in side.items]
    if not all(isinstance(value, sympy.Eq) and is_assignment_relation(value) for value in values):
        return []
    return [str(take_first_relation(value).lhs) for value in values]


def _numbers(value: Any) -> list[Any]:
    """The numbers among the sides of an equation, or of several in a row; none for other values."""
    relations = getattr(value, "_unsorted_args", None) or [value]
    return [side for relation in relations for side in relation.args if _is_number(side)] if is_equation(value) else []


def _united(side: Answer) -> Answer:
    """A list of intervals as one set."""
    values = [item.value for item in side.items]
    is_set = not side.is_set and all(isinstance(value, sympy.Set) for value in values)
    return Answer([side.items[0]._replace(value=sympy.Union(*values))]) if is_set else side


def _is_undefined(value: sympy.Expr) -> bool:
    return bool(value.has(sympy.zoo, sympy.nan))


def _is_odd_root(value: Any) -> bool:
    """Whether it is a root of odd degree, or a power of one, of a real number that may be negative."""
    if not isinstance(value, sympy.Pow) or not value.exp.is_Rational or value.exp.q % 2 == 0 or value.exp.q == 1:
        return False
    return bool(value.base.is_real and not value.base.is_nonnegative)


def _real_root(power: sympy.Pow) -> sympy.Expr:
    return sympy.sign(power.base) ** power.exp.p * sympy.Abs(power.base) ** power.exp


def _has_pieces(value: sympy.Expr) -> bool:
    """Whether a formula may hold for some numbers only, so that more of them have to be tried."""
    roots = [power.base for power in value.atoms(sympy.Pow) if power.exp.is_Rational and not power.exp.is_Integer]
    return value.has(*_PIECEWISE) or any(base.has(sympy.Pow) for base in roots)


def _size(value: sympy.Expr) -> int:
    """Binary digits, before or after the point, of the largest or the smallest part of a number."""
    sizes = [0]
    for part in sympy.preorder_traversal(value):
        if part.is_Rational:
            sizes += [part.p.bit_length(), part.q.bit_length()]
        elif isinstance(part, sympy.Pow | sympy.Function) and part.is_number:
            numbers = [number for number in (part.evalf(5), *(each.evalf(5) for each in part.args)) if number.is_finite]
            sizes += [abs(mag(mpmathify(number))) for number in numbers if number]
            if isinstance(part, sympy.Function):  # tanh(100) is about 1 - 2 exp(-200)
                sizes += [int(min(3 * abs(number), 3 * _MOST_DIGITS)) for number in numbers[1:]]
    return max(sizes)


def _evaluated(value: sympy.Expr, digits: int) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The real and the imaginary part in digits; None if they have none."""
    parts = value.evalf(digits).as_real_imag()
    if not all((part.is_Float or part.is_Rational) and part.is_finite for part in parts):
        return None
    # If the terms of a difference cancel out, none of its digits is right.
    real, imaginary = (sympy.S.Zero if part.is_Float and part._prec < 10 else part for part in parts)
    return real, imaginary


def _symbols(value: Any) -> set[sympy.Symbol]:
    return {each for each in getattr(value, "free_symbols", ()) if isinstance(each, sympy.Symbol)}


def _is_word(value: sympy.Expr) -> bool:
    is_greek = value.is_Symbol and value.name in GREEK_LETTER_MAP.values()
    return value.is_Symbol and value.name.isalpha() and len(value.name) > 1 and not is_greek


def _rounds_away(gold: Any, answer: Any) -> bool:
    """Whether two numbers count as equal only because both are small."""
    if not (_is_number(gold) and _is_number(answer)):
        return False
    first, second = (number.doit().evalf(20) for number in (gold, answer))
    largest = max(abs(first), abs(second))
    return bool(min(abs(first), abs(second)) < _SMALL and abs(first - second) > _RELATIVE_TOLERANCE * largest)


def _is_number(expression: object) -> bool:
    return isinstance(expression, sympy.Basic) and bool(getattr(expression, "is_number", False))
