"""Random mathematical answers, and a printer of its own for each notation that answers come in.

It shares nothing with the code that reads answers: an expression is a tree of tuples, and its value is sympy's.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import sympy
from hypothesis import strategies as st

Tree = tuple  # ("number", 3), ("symbol", "x"), ("constant", "pi"), (head, *trees)

_SYMBOLS = "abkmnprstvwxyzhlg"  # without d, which is a differential before another letter
_GREEK = {"θ": r"\theta", "α": r"\alpha", "β": r"\beta", "λ": r"\lambda"}
_LOOKS = [r"\mathbf{%s}", r"\boldsymbol{%s}", r"\bm{%s}"]
_LOOKS += [r"\textcolor{red}{%s}", r"{\color{blue}%s}", r"\underline{%s}"]
_E = ("e", r"\mathrm{e}", r"{\rm e}", r"\operatorname{e}", r"\text{e}")


_VALUES = {
    "sum": operator.add,
    "difference": operator.sub,
    "product": operator.mul,
    "quotient": operator.truediv,
    "power": operator.pow,
    "root": sympy.sqrt,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "exp": sympy.exp,
}


def trees(symbols: str = _SYMBOLS, depth: int = 3) -> st.SearchStrategy[Tree]:
    """Expressions; without symbols, exact numbers."""
    numbers = st.tuples(st.just("number"), st.integers(2, 30))
    constants = st.tuples(st.just("constant"), st.sampled_from(["pi", "e"]))
    letters = st.tuples(st.just("symbol"), st.sampled_from([*symbols, *_GREEK])) if symbols else numbers
    leaves = st.one_of(numbers, letters, letters, constants)

    def grown(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            *(st.tuples(st.just(head), inner, inner) for head in ("sum", "difference", "product", "quotient")),
            st.tuples(st.just("power"), letters, st.tuples(st.just("number"), st.integers(2, 12))),
            st.tuples(st.just("root"), inner),
            st.tuples(st.sampled_from(["sin", "cos", "exp"]), inner),
        )

    return st.recursive(leaves, grown, max_leaves=2 * depth)


def value(tree: Tree) -> sympy.Expr:
    """The expression, with positive symbols."""
    head, *parts = tree
    if head == "number":
        return sympy.Integer(parts[0])
    if head == "symbol":
        return sympy.Symbol(parts[0], positive=True)
    if head == "constant":
        return {"pi": sympy.pi, "e": sympy.E}[parts[0]]
    values = [value(part) for part in parts]
    return _VALUES[head](*values)


def differ(first: Tree, second: Tree) -> bool:
    """Whether two expressions have different values, clearly so at some point."""
    one, other = value(first), value(second)
    if not all(side.is_finite is not False and not side.has(sympy.zoo, sympy.nan) for side in (one, other)):
        return False
    for start in (3, 7):
        point = {symbol: sympy.Rational(start + 2 * index, 5) for index, symbol in enumerate(_ordered(one, other))}
        left, right = (complex(side.subs(point).evalf(30)) for side in (one, other))
        sizes = [abs(part) for part in (left.real, left.imag, right.real, right.imag)]
        if max(sizes) > 1e100:  # too large to say
            return False
        if abs(left - right) > 1e-9 * max(abs(left), abs(right), 1e-9):
            return True
    return False


def _ordered(*values: sympy.Expr) -> list[sympy.Symbol]:
    return sorted(set().union(*(each.free_symbols for each in values)), key=str)


def perturbed(tree: Tree, random: Random) -> Tree:
    """The expression with one number, sign or symbol changed, or without one of its terms or factors."""
    head, *parts = tree
    if head == "number":
        return ("number", parts[0] + random.choice((1, 10)))
    if head == "symbol":
        return ("symbol", random.choice([letter for letter in "uqcj" if letter != parts[0]]))
    if head == "constant":
        return ("constant", "e" if parts[0] == "pi" else "pi")
    if head in ("sum", "difference", "product") and random.random() < 0.5:
        return random.choice(
            [parts[0], ("sum" if head == "difference" else "difference", *parts)] if head != "product" else parts
        )
    changed = random.randrange(len(parts))
    return (head, *(perturbed(part, random) if index == changed else part for index, part in enumerate(parts)))


@dataclass
class Printer:
    """Writes expressions, and chooses at random among the ways to write each part."""

    random: Random

    def __call__(self, tree: Tree) -> str:
        head, *parts = tree
        if head in ("number", "symbol", "constant"):
            return self.leaf(head, parts[0])
        if head in ("sum", "difference"):
            right = self.grouped(parts[1], ("sum",) if head == "sum" else _ADDITIVE)
            return f"{self(parts[0])} {self.sign(head)} {right}"
        return self.function(head, parts[0]) if head in ("sin", "cos") else getattr(self, head)(*parts)

    def grouped(self, tree: Tree, heads: Sequence[str]) -> str:
        return self.parentheses(self(tree)) if tree[0] in heads else self(tree)

    # Each notation defines what follows.

    def leaf(self, head: str, name: object) -> str:
        raise NotImplementedError

    def sign(self, head: str) -> str:
        return {"sum": "+", "difference": "-"}[head]

    def parentheses(self, text: str) -> str:
        return f"({text})"

    def quotient(self, over: Tree, under: Tree) -> str:
        return f"{self.grouped(over, _COMPOUND)}/{self.grouped(under, _COMPOUND)}"

    def function(self, name: str, part: Tree) -> str:
        return f"{name}({self(part)})"


_ADDITIVE = ("sum", "difference")
_COMPOUND = ("sum", "difference", "product", "quotient")


class Latex(Printer):
    """LaTeX, plain or with what only changes the look."""

    fancy = True

    def _pick(self, *choices: str) -> str:
        return self.random.choice(choices) if self.fancy else choices[0]

    def leaf(self, head: str, name: object) -> str:
        text = (
            {"pi": r"\pi", "e": self._pick(*_E)}[str(name)] if head == "constant" else _GREEK.get(str(name), str(name))
        )
        return self.random.choice(_LOOKS) % text if self.fancy and self.random.random() < 0.15 else text

    def parentheses(self, text: str) -> str:
        left, right = self.random.choice((("", ""), (r"\left", r"\right"), (r"\bigl", r"\bigr"), (r"\Big", r"\Big")))
        return f"{left}({text}{right})" if self.fancy else f"({text})"

    def product(self, first: Tree, second: Tree) -> str:
        left, right = self.grouped(first, _COMPOUND), self.grouped(second, _COMPOUND)
        # Neighbouring digits would be one number, and a function takes what follows.
        dot = second[0] in ("number", "power", "root", "quotient", "product") or first[0] in ("sin", "cos")
        between = self._pick(r"\cdot", r"\times") if dot else self._pick("", r"\,", r"\cdot")
        return f"{left} {between} {right}"

    def quotient(self, over: Tree, under: Tree) -> str:
        top, bottom = self(over), self(under)
        forms = [rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{top}}}{{{bottom}}}", rf"{{{top} \over {bottom}}}"]
        forms += [rf"\tfrac{{{top}}}{{{bottom}}}", rf"\nicefrac{{{top}}}{{{bottom}}}", rf"\sfrac{{{top}}}{{{bottom}}}"]
        if len(top) == len(bottom) == 1:
            forms.append(rf"\frac{top}{bottom}" if top.isdigit() else rf"\frac {top}{bottom}")
        return self._pick(*forms)

    def power(self, base: Tree, exponent: Tree) -> str:
        return f"{self(base)}^{{{self(exponent)}}}"

    def root(self, part: Tree) -> str:
        text = self(part)
        return rf"\sqrt {text}" if self.fancy and len(text) == 1 else rf"\sqrt{{{text}}}"

    def function(self, name: str, part: Tree) -> str:
        return rf"\{name}{self.parentheses(self(part))}"

    def exp(self, part: Tree) -> str:
        return rf"{self._pick(*_E)}^{{{self(part)}}}"


class PlainLatex(Latex):
    """LaTeX as a textbook's answer has it."""

    fancy = False


class Unicode(Latex):
    """Text with characters of Unicode instead of commands."""

    fancy = False
    _SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

    def leaf(self, head: str, name: object) -> str:
        return {"pi": "π", "e": "e"}[str(name)] if head == "constant" else str(name)

    def sign(self, head: str) -> str:
        return {"sum": "+", "difference": "−"}[head]

    def product(self, first: Tree, second: Tree) -> str:
        return f"{self.grouped(first, _COMPOUND)}{self.random.choice('·×')}{self.grouped(second, _COMPOUND)}"

    def quotient(self, over: Tree, under: Tree) -> str:
        vulgar = {(("number", 3), ("number", 4)): "¾", (("number", 2), ("number", 3)): "⅔"}
        return vulgar.get((over, under)) or Printer.quotient(self, over, under)

    def power(self, base: Tree, exponent: Tree) -> str:
        return f"{self(base)}{str(exponent[1]).translate(self._SUPERSCRIPTS)}"

    def root(self, part: Tree) -> str:
        return f"√({self(part)})" if part[0] not in ("number", "symbol") else f"√{self(part)}"


class Program(Printer):
    """Text as programs write it."""

    def leaf(self, head: str, name: object) -> str:
        names = {"pi": "pi", "e": "exp(1)"}
        return names[str(name)] if head == "constant" else _GREEK.get(str(name), str(name)).lstrip("\\")

    def product(self, first: Tree, second: Tree) -> str:
        return f"{self.grouped(first, _COMPOUND)}*{self.grouped(second, _COMPOUND)}"

    def power(self, base: Tree, exponent: Tree) -> str:
        return f"{self(base)}{self.random.choice(('**', '^'))}{self(exponent)}"

    def root(self, part: Tree) -> str:
        return f"{self.random.choice(('', 'np.', 'math.'))}sqrt({self(part)})"

    def exp(self, part: Tree) -> str:
        return f"exp({self(part)})"
