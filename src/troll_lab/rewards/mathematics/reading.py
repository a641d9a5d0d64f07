"""Reads an answer as a list of values: its separators, sets, conditions, ratios and percentages."""

import re
from typing import Any, NamedTuple

import sympy
from math_verify.grader import is_equation, is_relation
from sympy.core.relational import Relational

from troll_lab.rewards.mathematics.parser import parse

_BUILDER = re.compile(
    r"\\\{ *([a-zA-Z]) *(?:\\in *\\mathbb *(?:\{R\}|R) *)?"
    r"(?:\\(?:mid|colon)(?![a-z])|[:|]|\\text\{ *such that *\})(.*)\\\}"
)
_BRACES = re.compile(r"\\\{((?!\s*\\\})(?:[^\\]|\\[^}])*)\\\}")
_MEMBER = re.compile(r"[A-Za-z] *(?:\\in|=) *(?=\\\{)")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|neq)(?![a-z])")
_OR = r"\\text\{[ ,]*(?:or|OR)[ ,]*\}|(?<![A-Za-z\\{])or(?![A-Za-z}])|\\lor(?![a-z])"
_AND = r"\\text\{[ ,]*and[ ,]*\}|(?<![A-Za-z\\{])and(?![A-Za-z}])|\\land(?![a-z])"
_EITHER = re.compile(rf"[,;]? *(?:{_OR}|\\cup(?![a-z]))")
_BOTH = re.compile(rf"[,;]? *(?:{_AND}|\\cap(?![a-z]))")
_COMMA = re.compile(rf"[,;] *(?:{_AND}|{_OR})?")
_BETWEEN_ITEMS = re.compile(rf"{_COMMA.pattern}|{_AND}|{_OR}")
_COLON = re.compile(":")
_TERM = re.compile(r"(?<=.)[-+]|\\%")
_BRACKET = re.compile(r"\\?[{}]|[()\[\]]")


class Item(NamedTuple):
    """One value of an answer."""

    value: Any  # the expression; a percentage without its sign; the solutions of inequalities in one variable
    text: str = ""
    is_percentage: bool = False
    variable: str | None = None  # of inequalities
    is_solved: bool = True  # false for a condition that has to be solved for its variable
    may_be_a_point: bool = False  # where it is an open interval


class Answer(NamedTuple):
    """One of the two answers, as a list, usually of one item."""

    items: list[Item]
    is_set: bool = False  # written in braces


def read(text: str) -> Answer:
    r"""Reads an answer; `\{x \mid x > 3\}` becomes the set of its condition."""
    builder = _BUILDER.fullmatch(text)
    if builder:
        condition = _conditions(builder[2])
        if condition is not None and condition.variable == builder[1]:
            if isinstance(condition.value, sympy.FiniteSet):
                return Answer([Item(value, is_solved=condition.is_solved) for value in condition.value.args], True)
            return Answer([condition._replace(variable=None)])
    text = _MEMBER.sub("", text) if _MEMBER.match(text) else text
    if _INEQUALITY.search(text):
        condition = _conditions(text)
        if condition is not None:
            return Answer([condition])
    braces = _BRACES.fullmatch(text)
    parts = [side for part in _split(braces[1] if braces else text, _BETWEEN_ITEMS) for side in _signs(part)]
    return Answer([_item(part) for part in parts], is_set=braces is not None)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts of a text between separators outside of brackets."""
    parts, start, depth = [], 0, 0
    for found in re.finditer(rf"(?P<separator>{separator.pattern})|{_BRACKET.pattern}", text):
        if found["separator"] is None:
            depth += 1 if found[0][-1] in "{[(" else -1
        elif not depth:
            parts.append(text[start : found.start()])
            start = found.end()
    return [part.strip() for part in (*parts, text[start:])]


def _signs(text: str) -> list[str]:
    if r"\pm" not in text:
        return [text]
    if text.count(r"\pm") > 1:
        raise ValueError(f"{text!r} has several signs that may belong together or not")
    return [text.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in ("+-", "-+")]


def _item(text: str) -> Item:
    ratio = _split(text, _COLON)
    if len(ratio) > 1:  # which the parser takes for divisions
        first, *others = map(parse, ratio)
        value = sympy.Tuple(1, *(other / first for other in others)) if len(others) > 1 else first / others[0]
        return Item(value, text)
    number = text.removesuffix(r"\%")
    is_percentage = number != text and len(_split(number.rpartition("=")[2].strip(), _TERM)) == 1
    return Item(parse(number if is_percentage else text), text, is_percentage, may_be_a_point=True)


def _conditions(text: str) -> Item | None:
    """The real numbers that fulfil conditions; None if they are not relations in one variable."""
    for connective, combine in ((_EITHER, sympy.Union), (_BOTH, sympy.Intersection), (_COMMA, None)):
        parts = _split(text, connective)
        if len(parts) > 1:
            conditions = [_conditions(part) for part in parts]
            sets = [condition.value for condition in conditions if condition]
            variables = {condition.variable for condition in conditions if condition}
            if len(sets) < len(parts) or len(variables) != 1:
                return None
            if combine is None:  # a condition that no number fulfils is never meant
                combine = sympy.Intersection if sympy.Intersection(*sets) is not sympy.S.EmptySet else sympy.Union
            is_solved = all(condition.is_solved for condition in conditions if condition)
            return Item(combine(*sets), text, variable=variables.pop(), is_solved=is_solved)
    try:
        relation = parse(text)
        if not is_relation(relation) or len(relation.free_symbols) != 1:
            return None
        # x \in [0, 1] is read as an equation.
        solutions = relation.rhs if is_equation(relation) and isinstance(relation.rhs, sympy.Set) else relation.as_set()
    except Exception:
        return None
    is_solved = all(map(_is_solved, relation.atoms(Relational)))
    return Item(solutions, text, variable=next(iter(relation.free_symbols)).name, is_solved=is_solved)


def _is_solved(relation: Relational) -> bool:
    """Whether one side is a symbol or its absolute value, and the other side has no symbols."""
    names, values = sorted(relation.args, key=lambda side: not side.free_symbols)
    name = names.args[0] if isinstance(names, sympy.Abs) else names
    return name.is_Symbol and not values.free_symbols
