r"""math-verify's parser of LaTeX, corrected where it would silently misread an answer.

Such an answer is read correctly, or refused if it can be read in several ways:

- The parser adds any neighbours, as in `1\frac{1}{2}`: `3(5)` would be 8. It multiplies `1\frac12\pi`.
- The argument of a function without parentheses goes on after `\cdot` and `/`: `\ln 2 \cdot 3` would be `\ln 6`.
- The exponent `T` is a transposition, which numbers ignore: `(1+r)^T` would be `1+r`.
- `d` and the next letter are one symbol: `ad` and `da` would be different.
- `2^{3}^{2}` is `(2^3)^2`, and in a program `2**3**2` is `2^9`.
- The greatest common divisor of symbols is that of polynomials, 1.

math-verify's parser is `_Latex2Sympy`, a private class of latex2sympy2_extended. Only this file uses it, and checks at
import that the class has the methods that `_Parser` overrides or calls.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy

from troll_lab.rewards.mathematics.notation import TOKEN, partners_of

_CONVERSION = ConversionConfig(lowercase_symbols=False)
_MIXED_NUMBER = re.compile(r"\d+ \\frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_NEIGHBOURS = re.compile(r".*(?:[\d.%]|\\circ\}) \{?[\d.].*", re.ASCII)
_POWER_OF_POWER = re.compile(r"\^(?:\{[^{}]*\}|\w) *\^")
_DIFFERENTIAL = re.compile(r"d\s*(?:[A-Za-z]|\\[A-Za-z]+)")
_ANGLES = "sin|cos|tan|cot|sec|csc"
_FUNCTION = re.compile(
    rf" *\\(?:(?P<angle>{_ANGLES})|a(?:rc?)?(?:{_ANGLES})|(?:arc?)?(?:sin|cos|tan|cot)h|ln|log)(?![A-Za-z])"
    r"(?: *[\^_] *\{(?:[^{}]|\{[^{}]*\})*\})* *"
)
_TIMES = re.compile(r" *(?:\\cdot|\\times|\*)(?![A-Za-z])")
_DIVIDED = re.compile(r" */| *\\div(?![A-Za-z])")
_PART_OF_PI = re.compile(r"[\d. ]*\\pi *", re.ASCII)
# What ends the argument of a function, in addition to a product, a quotient, another function and a closing bracket.
_END = re.compile(r" *(?:[-+=<>,;:&|]|\\(?:pm|mp|le|ge|neq|approx|in|to|cup|cap|lor|land|text|%|\\)(?![A-Za-z]))")
_SCRIPT = re.compile(r" *[\^_] *\{[^{}]*\}")
_GROUP = re.compile(r"\{[^{}]*\}")
# Between two equal signs: the end of one statement and the name of the next, as in `x = 17 x = 18`.
_ANOTHER = re.compile(
    r"[\d)\]] +\\?[A-Za-z]+(?:_\w)? *$|\\\\|;"
    r"|\\(?:Long|long)?(?:[lL]eft)?[rR]ightarrow|\\(?:implies|iff|therefore|to)(?![A-Za-z])"
)


def parse(text: str) -> Any:
    """The expression, relation, set or the like of a text in one notation.

    Raises:
        Exception: Of many types, if it cannot be read, or can be read in several ways.
    """
    flat = text
    while _GROUP.search(flat):  # an equal sign in a sum's limits is none of a chain
        flat = _GROUP.sub("0", _SCRIPT.sub("", flat))
    if any(map(_ANOTHER.search, flat.split("=")[1:-1])):
        raise ValueError(f"{text!r} has several statements")
    try:
        if _POWER_OF_POWER.search(text):
            raise ValueError(f"{text!r} has a power of a power")
        prepared = _with_parentheses(text.replace("^{T}", "^{ T}"))
        return _Parser(is_real=True, config=_CONVERSION).parse(prepared)
    except Exception:
        if text.count("=") < 2:
            raise
        return parse(text.rpartition("=")[2])


#: The methods of `_Latex2Sympy` that `_Parser` needs, and the parameters that it passes.
_NEEDED = {
    "__init__": ("is_real", "config"),
    "parse": ("latex_str",),
    "convert_postfix_list": ("arr", "i"),
    "convert_postfix": ("postfix",),
    "convert_exp": ("exp",),
    "convert_atom": ("atom",),
    "convert_binom": ("binom",),
    "convert_expr": ("expr",),
    "handle_gcd_lcm": ("f", "args"),
    "create_symbol": ("text",),
    "get_differential_var": ("d",),
    "mat_mul_flat": ("lh", "rh"),
    "mul_flat": ("lh", "rh"),
}


def check_parser(parser: type) -> None:
    """Checks that a class has the methods of `_NEEDED`.

    Raises:
        ImportError: If it lacks some; names them.
    """
    signatures = {name: inspect.signature(getattr(parser, name)) for name in _NEEDED if hasattr(parser, name)}
    lacking = [
        f"{name}({', '.join(parameters)})"
        for name, parameters in _NEEDED.items()
        if name not in signatures or not signatures[name].parameters.keys() >= set(parameters)
    ]
    if lacking:
        raise ImportError(
            f"{parser.__name__} of latex2sympy2_extended {version('latex2sympy2_extended')} lacks "
            f"{' and '.join(lacking)}: pip install latex2sympy2_extended==1.11.0"
        )


check_parser(_Latex2Sympy)


class _Parser(_Latex2Sympy):
    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        if i + 1 == len(arr):
            return super().convert_postfix_list(arr, i)
        pair = f"{arr[i].getText()} {arr[i + 1].getText()}"
        mixed = _MIXED_NUMBER.fullmatch(pair)
        if mixed and int(mixed[1]) < int(mixed[2]):
            value, i = super().convert_postfix_list(arr[i : i + 2]), i + 1
        elif _NEIGHBOURS.fullmatch(pair):
            raise ValueError(f"{pair} are two numbers")
        else:
            value = self.convert_postfix(arr[i])
            if isinstance(value, list):  # the operator of a derivative
                return super().convert_postfix_list(arr, i)
        if i + 1 == len(arr):
            return value
        factors = value, self.convert_postfix_list(arr, i + 1)
        return (self.mat_mul_flat if any(factor.is_Matrix for factor in factors) else self.mul_flat)(*factors)

    def convert_exp(self, exp: Any) -> Any:
        value = super().convert_exp(exp)
        base = exp.exp() if hasattr(exp, "exp") else exp.exp_nofunc()
        if base and _DIFFERENTIAL.fullmatch(base.getText()):  # `dx^2`
            d, name = value.base.args
            return sympy.Mul(d, sympy.Pow(name, value.exp, evaluate=False), evaluate=False)
        return value

    def convert_atom(self, atom: Any) -> Any:
        if atom.DIFFERENTIAL():
            return sympy.Mul(self.create_symbol("d"), self.get_differential_var(atom.DIFFERENTIAL()), evaluate=False)
        return super().convert_atom(atom)

    def convert_binom(self, binom: Any) -> Any:
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def handle_gcd_lcm(self, f: str, args: Any) -> Any:
        if any(argument.free_symbols for argument in args):
            return sympy.Function(f)(*sorted(args, key=sympy.default_sort_key))
        return super().handle_gcd_lcm(f, args)


def _with_parentheses(text: str) -> str:
    r"""The text with parentheses around the arguments of functions that a product or a quotient follows.

    `\sin x \cdot y` is a product, `\ln 2 / \ln 3` a quotient, and in `\sin\pi/6` the quotient is an angle.

    Raises:
        ValueError: If it has another quotient, such as `\ln 2/3`, where the end of the argument is not clear.
    """
    partners = partners_of(text) or {}
    parts, done, at = list[str](), 0, 0
    while found := _FUNCTION.search(text, at):
        start = found.end()
        if text.startswith("{", start) and start in partners:
            end = partners[start]
            parts += [text[done:start], "(", _with_parentheses(text[start + 1 : end]), ")"]
            done = at = end + 1
            continue
        end, is_followed = _argument(text, start, partners, bool(found["angle"]))
        if is_followed:
            parts += [text[done:start], "(", _with_parentheses(text[start:end]), ")"]
            done = end
        at = end if is_followed else start
    return "".join([*parts, text[done:]])


def _argument(text: str, start: int, partners: dict[int, int], is_angle: bool) -> tuple[int, bool]:
    """Where the argument that starts at a place ends, and whether a product or a quotient follows it."""
    if text.startswith("(", start):
        return start, False
    if inner := _FUNCTION.match(text, start):
        opened = inner.end()
        if text[opened : opened + 1] in ("(", "{") and opened in partners:
            at = partners[opened] + 1
            return at, bool(_TIMES.match(text, at) or _DIVIDED.match(text, at))
        return _argument(text, opened, partners, bool(inner["angle"]))
    at = start
    if text.startswith("|", start):
        at = text.find("|", start + 1) + 1 or len(text)
        if _DIVIDED.match(text, at):
            return at, True
    while at < len(text) and text[at] not in ")]}":
        if _TIMES.match(text, at):
            return at, True
        if divided := _DIVIDED.match(text, at):
            if _FUNCTION.match(text, divided.end()):
                return at, True
            if not is_angle or not _PART_OF_PI.fullmatch(text, start, at):
                raise ValueError(f"the function of {text[start:at]!r} may end before or after the quotient")
            at = divided.end()
        elif _FUNCTION.match(text, at) or (_END.match(text, at) and not (at == start and text[at] in "+-")):
            break
        elif at in partners:
            at = partners[at] + 1
        else:
            token = TOKEN.match(text, at)
            at = token.end() if token else at + 1
    return at, False
