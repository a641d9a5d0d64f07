"""An answer equals itself in every notation, and its perturbations in none; notations come from `rendering.py`."""

from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.troll_lab.rewards.mathematics.rendering import Latex, PlainLatex, Program, Unicode, differ, perturbed, trees
from troll_lab.rewards.mathematics.grader import compare
from troll_lab.rewards.mathematics.pool import Comparison

_NOTATIONS = {
    "looks": (PlainLatex, Latex),
    "unicode": (PlainLatex, Unicode),
    "program": (PlainLatex, Program),
    "gold in unicode": (Unicode, PlainLatex),
    "gold as a program": (Program, PlainLatex),
    "gold with looks": (Latex, PlainLatex),
}
_RANDOM = st.integers(0, 2**32 - 1).map(Random)


#: Functions that make pairs that have to be equal and pairs that must not be, and the strategies of their arguments.
_KINDS = {}


def _kind(*strategies):
    def register(pairs_of):
        _KINDS[pairs_of.__name__.strip("_").replace("_", " ")] = (pairs_of, strategies)
        return pairs_of

    return register


def _printed(printer, random, tree):
    text = printer(random)(tree)
    assume(len(text) < 400)
    return text


def _expressions(gold_printer, answer_printer, tree, random):
    gold = _printed(gold_printer, random, tree)
    others = [other for other in (perturbed(tree, random) for _ in range(2)) if differ(tree, other)]
    right = [(gold, _printed(answer_printer, random, tree)) for _ in range(3)]
    return right, [(gold, _printed(answer_printer, random, other)) for other in others]


for _name, _printers in _NOTATIONS.items():
    _KINDS[_name] = (partial(_expressions, *_printers), (trees(), _RANDOM))


@_kind(trees(depth=2), st.sampled_from("tshmlgckdV"), _RANDOM)
def _letter_at_the_end(tree, letter, random):
    assume(tree[0] in ("number", "quotient", "product", "power", "root"))
    assume(differ(tree, ("product", tree, ("number", 2))))
    gold = f"{PlainLatex(random).grouped(tree, ('quotient', 'product'))} {letter}"
    without = PlainLatex(random)(tree)
    moved = rf"\frac{{{letter} \cdot {PlainLatex(random).grouped(tree, ('sum', 'difference'))}}}{{1}}"
    return [(gold, moved)], [(gold, without), (gold, f"{without} w"), (f"x - {gold}", f"x - {without}")]


@_kind(trees(symbols="", depth=2), st.integers(50, 2000), _RANDOM)
def _exact_numbers(tree, exponent, random):
    number = PlainLatex(random).grouped(tree, ("sum", "difference", "quotient", "product"))
    assume(differ(tree, ("product", tree, ("number", 2))))
    gold, other = rf"{number} \cdot (1 - 2^{{-{exponent}}})", rf"{number} \cdot (1 - 2^{{-{exponent + 1}}})"
    same = rf"{number} \cdot \frac{{2^{{{exponent}}} - 1}}{{2^{{{exponent}}}}}"
    wrong = [(gold, other), (gold, number), (number, gold)]
    wrong += [(f"{gold} x", f"{other} x"), (f"(1, {gold})", f"(1, {other})")]
    return [(gold, same), (f"x = {gold}", same)], wrong


@_kind(st.lists(trees(depth=1), min_size=2, max_size=4), _RANDOM)
def _lists(parts, random):
    assume(all(differ(one, other) for index, one in enumerate(parts) for other in parts[:index]))
    texts = [_printed(PlainLatex, random, part) for part in parts]
    assume(not any("(" in text or " " in text.strip() for text in texts))
    gold, twice = ", ".join(texts), [*texts, texts[0]]
    shuffled = random.sample(texts, len(texts))
    joined = [", ".join(shuffled), "; ".join(shuffled), r" \text{ and } ".join(shuffled), " or ".join(shuffled)]
    wrong = [(gold, ", ".join(twice)), (", ".join(twice), gold), (gold, ", ".join(texts[1:]))]
    wrong += [(", ".join(twice), ", ".join([*texts, texts[1]]))]
    braces = rf"\{{{gold}\}}"
    return [(gold, each) for each in joined] + [(braces, ", ".join(twice)), (braces, rf"\{{{joined[0]}\}}")], wrong


@_kind(st.integers(1, 9999), st.integers(1, 3), st.integers(1, 99), st.integers(2, 9))
def _percentages(digits, places, whole, under):
    decimal = f"{digits / 10**places:.{places}f}"
    mixed, improper = rf"{whole}\frac{{1}}{{{under}}}", rf"\frac{{{whole * under + 1}}}{{{under}}}"
    sign = [r"\%", "%", r" \%", r"\,\%", " percent", r"\text{ percent}"]
    right = [
        (decimal, f"{decimal}0{sign[digits % 6]}"),
        (rf"{decimal}\%", decimal),
        (mixed, f"{mixed}{sign[under % 4]}"),
    ]
    right += [(rf"{mixed}\%", improper), (rf"\frac{{{whole * under + 1}}}{{{under * 100}}}", rf"{mixed}\%")]
    right += [(f"{digits},000", rf"{digits}{{,}}000\%")] if digits < 1000 else []
    wrong = [
        (decimal, f"{digits / 10**places + 1:.{places}f}\\%"),
        (rf"{decimal}\%", f"{digits / 10**places * 10:.6f}"),
    ]
    return right, [*wrong, (mixed, rf"{whole + 1}\frac{{1}}{{{under}}}\%"), (rf"\frac{{1}}{{{under}}}", rf"{under}\%")]


@_kind(st.integers(2, 99), st.integers(3, 99), st.integers(2, 9))
def _neighbours(first, second, under):
    product, whole = str(first * second), f"{first}{second}"
    fraction, mixed = rf"\frac{{{first}}}{{{under}}}", rf"\frac{{{first * under + 1}}}{{{under}}}"
    right = [(product, f"{first}({second})"), (product, f"({first})({second})"), (product, f"({first}){second}")]
    right += [(f"-{product}", f"-{first}({second})"), (fraction, rf"{first}\left(\frac{{1}}{{{under}}}\right)")]
    wrong = [(str(first + second), answer) for _, answer in right[:3]] + [(mixed, right[-1][1])]
    return right, wrong + [(gold, f"{first} {second}") for gold in (product, whole, str(first + second))]


_UNITS = (
    r"\,\Omega", r"\ \mu\text{m}", r"\ \frac{\text m}{\text s}", r" {\rm cm}", " km/h", " €", r"\text{ cm}",
    r"~\mathrm{m}^2", r"\,\mathrm{kg\cdot m^2}", " kg", " m", r"^\circ\text{C}", "°", r"\,\text{m}/\text{s}^{2}",
    " hours", r"\textrm{ N}", r"\;\mathrm{m\,s^{-1}}", r"\text{ dollars}", r"\mbox{ kJ}",
)  # fmt: skip


@_kind(st.integers(1, 9999), st.sampled_from(_UNITS), st.sampled_from(_UNITS[6:9]), _RANDOM)
def _units(number, unit, gold_unit, random):
    forms = [str(number), f"{number}.0", rf"\frac{{{2 * number}}}{{2}}"]
    right = [(str(number), form + unit) for form in forms] + [(f"{number}{gold_unit}", f"{number}{unit}")]
    right += [(f"{number}{gold_unit}", str(number)), (str(number), f"x = {number}{unit}")]
    wrong = [(str(number), f"{number + 1}{unit}"), (str(number), f"{number}0{unit}"), (str(number), f"-{number}{unit}")]
    return right, [*wrong, (f"{number}{gold_unit}", f"{number + 1}{unit}"), (str(number), f"{number} x")]


_SIGNS = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}


@_kind(st.integers(-20, 20), st.integers(1, 9), st.sampled_from(")]"), st.sampled_from("(["), _RANDOM)
def _unions(low, gap, left, right_bracket, random):
    high = low + gap
    union = rf"(-\infty, {low}{left} \cup {right_bracket}{high}, \infty)"
    first = f"x {_SIGNS[left]} {low}"
    second = rf"x {_SIGNS[right_bracket].replace('<', '>').replace('le', 'ge')} {high}"
    words = (r"\text{ or }", " or ", r" \lor ", r" \vee ", ", ", r" \cup ")
    joined = [word.join(random.sample([first, second], 2)) for word in words]
    flipped = first.replace("<", r"\le") if "<" in first else first.replace(r"\le", "<")
    spoiled = [first.replace(str(low), str(low - 1)), first.replace("x", "y"), flipped]
    wrong = [(union, rf"{other} \text{{ or }} {second}") for other in spoiled]
    wrong += [(union, first), (union, rf"{first} \text{{ and }} {second}")]
    wrong.append((rf"{first} \text{{ or }} {second}", union.replace("x", "y") + "1"))
    return [(union, each) for each in joined] + [(each, union) for each in joined[:4]], wrong


@_kind(st.integers(0, 99), st.integers(0, 99), st.integers(1, 998), st.integers(0, 2))
def _repeating_decimals(whole, start, period, places):
    assume(str(period) != "9" * len(str(period)))
    prefix = f"{start:0{places}d}"[:places] if places else ""
    over = int(f"{whole}{prefix}{period}") - int(f"{whole}{prefix}")
    gold = rf"\frac{{{over}}}{{{10 ** len(prefix) * (10 ** len(str(period)) - 1)}}}"
    text = rf"{whole}.{prefix}\overline{{{period}}}"
    other = rf"{whole}.{prefix}\overline{{{period + 1}}}"
    right = [(gold, text), (text, gold), (gold, text.replace("overline", "bar"))]
    return right, [(gold, other), (other, gold), (gold, f"{whole}.{prefix}{period}")]


@_kind(st.lists(st.integers(-9, 9), min_size=4, max_size=4), st.integers(4, 20), st.integers(1, 3), _RANDOM)
def _matrices_and_binomials(numbers, n, k, random):
    a, b, c, d = numbers
    row = random.choice((r"\\", r"\\[4pt]", r"\\ [2mm]"))
    inside, other = f"{a} & {b} {row} {c} & {d}", f"{a} & {b} {row} {c} & {d + 1}"
    gold = rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}"
    forms = (
        r"\begin{bmatrix}%s\end{bmatrix}", r"\bigl(\begin{smallmatrix}%s\end{smallmatrix}\bigr)",
        r"\left(\begin{array}{cc}%s\end{array}\right)",
    )  # fmt: skip
    binomial = rf"\binom{{{n}}}{{{k}}}"
    written = (rf"{{{n} \choose {k}}}", rf"\dbinom{{{n}}}{{{k}}}", rf"\tbinom{{{n}}}{{{k}}}")
    right = [(gold, form % inside) for form in forms] + [(binomial, each) for each in written]
    wrong = [(gold, form % other) for form in forms] + [(binomial, rf"{{{n + 1} \choose {k}}}")]
    return right, [*wrong, (gold, forms[1] % f"{a} & {c} {row} {b} & {d}")] if b != c else wrong


_NAMES = st.sampled_from(["max", "min", "red", "in", "out", "eff", "tot"])


@_kind(st.sampled_from("xvTEmFI"), _NAMES, _NAMES, st.integers(2, 9))
def _subscripts(letter, name, other, power):
    assume(name != other)
    forms = [rf"\text {{{name}}}", rf"\text{{{name}}}", rf"\mathrm{{{name}}}", rf"\rm {name}", name]
    forms.append(rf"\textrm{{ {name} }}")
    texts = [rf"{power}{letter}_{{{form}}}^{{{power}}}" for form in forms]
    wrong = [
        (texts[0], rf"{power}{letter}_{{\text{{{other}}}}}^{{{power}}}"),
        (texts[0], f"{power}{letter}^{{{power}}}"),
    ]
    return [(one, texts[1]) for one in texts] + [(texts[1], one) for one in texts], wrong


@pytest.mark.parametrize("examples", [5, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _KINDS)
def test_answers_equal_themselves_and_no_perturbation(kind, examples):
    pairs_of, strategies = _KINDS[kind]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(st.tuples(*strategies))
    def check(values):
        right, wrong = pairs_of(*values)
        found = compare([*right, *wrong])
        refused = [pair for pair, each in zip(right, found, strict=False) if each is not Comparison.EQUAL]
        paid = [pair for pair, each in zip(wrong, found[len(right) :], strict=True) if each is Comparison.EQUAL]
        assert (refused, paid) == ([], [])

    check()


@pytest.mark.parametrize(("positive", "expected"), [(True, Comparison.EQUAL), (False, Comparison.DIFFERENT)])
def test_compare_with_positive_symbols(positive, expected):
    pairs = [
        (r"\sqrt{4\pi G\rho_0 r_0^2}", r"2r_0\sqrt{\pi G\rho_0}"),
        (r"\ln(xy)", r"\ln x+\ln y"),
        (r"\ln\frac{x}{y}", r"\ln x-\ln y"),
        (r"\sqrt{x^2 y}", r"x\sqrt{y}"),
        (r"|v|", "v"),
        (r"1.5\sqrt{x^2}", "1.5 x"),
    ]
    assert compare(pairs, positive_symbols=positive) == [expected] * len(pairs)
    wrong = [(r"\sqrt{x^2 y}", r"y\sqrt{x}"), ("x", "-x"), (r"\ln(xy)", r"\ln x\ln y")]
    assert compare(wrong, positive_symbols=positive) == [Comparison.DIFFERENT] * len(wrong)
