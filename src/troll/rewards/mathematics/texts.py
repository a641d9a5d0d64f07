"""The texts of answers before parsing: brings different spellings to one, and finds ambiguous answers."""

from __future__ import annotations

import re
from decimal import Decimal

#: Longer texts are not answers: the longest gold answer of the tasks' data sets has a few hundred characters.
MAX_CHARACTERS = 2000

_NUMBER = re.compile(r"[+-]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,3})(?![\w.])", re.ASCII)
_EQUAL_TO_THOUSANDS = re.compile(r"(?<==)(\s*[1-9]\d{0,2}(?:,\d{3})+)(?![\d,])", re.ASCII)
_MIXED_NUMBER = re.compile(r"(?<![\d.,])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", re.ASCII)
_CURRENCY = re.compile(r"(?<=\d)\s*(?:dollars?|euros?|USD|EUR)$")
_APPROXIMATELY = re.compile(r"\\approx|≈|\\simeq|\\sim\b")
_CHOICE_AND_STOP = re.compile(r"(?<=\{)(\(?[A-Z]\)?)\.(?=\}$)")
_IMAGINARY = re.compile(r"\\mathrm\s*\{i\}|(?<=\d)i(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d|\{[^{}]*\})\s*(\d(?!\d)|\{[^{}]*\})", re.ASCII)
_SPACE = r"(?:\\[,;:! ]|\s)"
_PERCENT = re.compile(rf"(?<=[\d}}]){_SPACE}*(?:\\?%|percent\b)")
_SPACED_THOUSANDS = re.compile(rf"(?<![\w.,^}}])[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?!{_SPACE}?\d)", re.ASCII)
# A word too long for a function's name or a product of variables, or a power of a unit of length.
_QUANTITY = re.compile(rf"({_NUMBER.pattern})\s*([a-z]{{4,}}|(?:[ckm]?m|in|ft|yd|mi)\^\{{?[23]\}}?)", re.ASCII)
_TIME = re.compile(r"0?(\d{1,2}:\d\d)\s*(?:([ap])\.?\s?m\.?)?", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z\s()]{2,}")
# Letters that are variables in most mathematics; a word is seldom made of them.
_PRODUCT = re.compile(r"(?:[a-df-hj-np-tv-z](?:\s|\\cdot(?![a-z]))*){2,5}")
_BETWEEN_ITEMS = re.compile(r"\s*(?:,\s*and\b|,|;|\band\b)\s*")
_ITEM = re.compile(r"[A-Za-z]|\([A-Za-z]\)")
# One, or a product of variables such as GMm.
_VARIABLES = re.compile(r"(?<![A-Za-z])(?:[A-Z]|(?i:[b-df-hj-np-tv-z]{2,5}))(?![A-Za-z])")
_PRIMES = re.compile(r"(?<=[A-Za-z)\]}])'+(?!s)")
_POINT = re.compile(r"(?<=\d)\.(?=\s*[/*)+-])", re.ASCII)  # of 1./3, which math-verify does not read
_NUMBER_BASE = re.compile(r"\d\s*_\s*(\{[^{}]*\}|\S)")
_ARGUMENTS = re.compile(r"\\[a-zA-Z]+\s*(?:\[[^\[\]]*\]\s*)?(?:\{[^{}]*\}\s*)+|[\^_]\s*\{[^{}]*\}")
_NEIGHBOURS = re.compile(r"(?<![_^\d.])\d[\d.]*(?:[\s(){}]|\\[,;:! %]|\\q?quad|\^\s*\\circ)+\d")
_WORDS = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))[a-z]*\s*\{([^{}]*)\}")
_COMMAND = re.compile(rf"{_WORDS.pattern}|\\[A-Za-z]+")
_ALTERNATIVE = re.compile(r"\b(?:and|or|nor|not)\b", re.IGNORECASE)
# Not before a hyphen, as in `two-liter bottles`; `thirds`, but `third graders`; `squared`, but `cm squared`.
_ARITHMETIC = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:hundred|thousand|(?:m|b|tr)illion|dozen)s?|halves"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s"
    r"|plus|minus|divided|multiplied)\b(?!-)|^\W*(?:half|squared|cubed|factorial)\b",
    re.IGNORECASE,
)


def tidy(text: str) -> str:
    """Drops everything without a meaning for the value, and brings different spellings to the one of math-verify."""
    text = text.replace(r"\$", "").replace("$", "").replace("{,}", ",").replace("−", "-")
    text = text.replace("{:}", ":").replace("°", r"^\circ").replace(r"\degree", r"^\circ")
    text = text.replace(r"\varnothing", r"\emptyset").replace("∅", r"\emptyset")
    text = re.sub(r"[\s~]", " ", text).strip().rstrip("\\ ")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _CURRENCY.sub("", _CHOICE_AND_STOP.sub(r"\1", text.lstrip("€£¥")))
    text = _PRIMES.sub(lambda match: "^{" + r"\prime" * len(match[0]) + "}", text)  # an apostrophe is dropped
    text = _POINT.sub("", _PERCENT.sub(r"\\%", text))
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _IMAGINARY.sub(" i", text))
    text = _FRACTION.sub(lambda match: rf"\frac{_braced(match[1])}{_braced(match[2])}", text)
    return _SPACED_THOUSANDS.sub(lambda match: re.sub(_SPACE, "", match[0]), text)


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def same_at_sight(gold: str, answer: str) -> bool | None:
    """Whether two tidy texts are the same answer, if that needs no parser; else None."""
    if not answer or len(answer) > MAX_CHARACTERS or len(gold) > MAX_CHARACTERS:
        return bool(answer) and answer == gold
    if answer == gold:
        return True
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(answer):
        return Decimal(gold.replace(",", "")) == Decimal(answer.replace(",", ""))
    expected, given = (
        _TIME.fullmatch(_without_groups(text).rpartition("=")[2].strip().lower()) for text in (gold, answer)
    )
    if expected:  # math-verify would divide
        return given is not None and given[1] == expected[1] and {given[2], expected[2]} != {"a", "p"}
    letters = _letters(gold), _letters(answer)
    if None not in letters:
        return letters[0] == letters[1]
    return False if is_ambiguous(gold, answer) else None


def for_math_verify(gold: str, answer: str) -> tuple[str, str]:
    """Spells two tidy texts so that math-verify reads them correctly."""
    if _are_products(gold, answer):  # in `a b`, it takes the b for a unit
        return re.sub(r"\s|\\cdot", "", gold), re.sub(r"\s|\\cdot", "", answer)
    return _capitals_told_apart(_numbers_spelled_out(gold), _numbers_spelled_out(_with_unit_as_text(answer)))


def _numbers_spelled_out(text: str) -> str:
    """Spells out numbers that math-verify misreads: it takes the e of 4.5e33 for Euler's, and x = 1,000 for two."""
    text = _SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)
    return _EQUAL_TO_THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)


def _capitals_told_apart(gold: str, answer: str) -> tuple[str, str]:
    """Gives capital letters other names where a text has the small letter as well, as in `N = n` and `GMm`.

    To math-verify they are one variable.
    """
    texts = [gold, answer]
    for text in (_COMMAND.sub(" ", each) for each in (gold, answer)):
        for capital in sorted(filter(str.isupper, set("".join(_VARIABLES.findall(text))))):
            free = next((name for name in "qwzvuhgkprst" if name not in "".join(texts).lower()), capital)
            if capital.lower() in text:
                texts = [_renamed(each, capital, free) for each in texts]
    return texts[0], texts[1]


def _renamed(text: str, symbol: str, name: str) -> str:
    """Gives a symbol another name, except in words and commands."""
    pattern = rf"{_COMMAND.pattern}|{symbol}"
    return re.sub(pattern, lambda found: name if found[0] == symbol else found[0], text)


def _with_unit_as_text(answer: str) -> str:
    r"""Writes `18 clips` as `18 \text{clips}`, which math-verify reads.

    Not in a gold answer, whose word may be a product.
    """
    quantity = _QUANTITY.fullmatch(answer)
    if quantity is None or _ARITHMETIC.search(quantity[2]):
        return answer
    return rf"{quantity[1]} \text{{{quantity[2]}}}"


def _without_groups(text: str) -> str:
    r"""The text with its `\text{...}` as plain words."""
    return _WORDS.sub(r"\1", text)


def is_ambiguous(gold: str, answer: str) -> bool:
    r"""Whether an answer says more than the one value that math-verify would read from it.

    - a box within the answer, a phantom, or braces that do not match: math-verify would read only a part;
    - `18 \approx 20`: it reads the left side. Allowed where the gold answer is approximate itself;
    - `1011_3`: it ignores the base of a number. Allowed where the gold answer has the same;
    - `10 8`, `10(8)`: it adds neighbouring numbers, as in `1\frac{1}{2}`. Allowed where the gold answer has some;
    - `18 \text{ or twenty}`, `\text{not } 18`: it takes text for a unit. `1 \text{ or } 2` is a list of two;
    - `18 \text{ million}`, `18 \text{ plus two}`: it takes this for a unit too. Allowed where the gold answer has the
      same words;
    - `CBA` for `ABC`: it takes letters for factors, in any order, which is right only for such as `xy` and `yx`.
    """
    if any(command in answer for command in (r"\boxed", r"\fbox", "phantom")) or not _braces_match(answer):
        return True
    if _APPROXIMATELY.search(answer) and not _APPROXIMATELY.search(gold):
        return True
    bases = [{base.strip("{} ") for base in _NUMBER_BASE.findall(text)} for text in (gold, answer)]
    if bases[1] and bases[0] != bases[1]:
        return True
    if _has_neighbours(answer) and not _has_neighbours(gold):
        return True
    if _is_anagram(gold, answer):
        return True
    groups = [words.strip() for words in _WORDS.findall(answer)]
    if any(_ALTERNATIVE.search(words) and words not in ("and", "or") for words in groups):
        return True
    return not _arithmetic(answer) <= _arithmetic(gold)


def _arithmetic(text: str) -> set[str]:
    return {found.strip().lower() for words in _WORDS.findall(text) for found in _ARITHMETIC.findall(words)}


def _is_anagram(gold: str, answer: str) -> bool:
    if not _LETTERS.fullmatch(_without_groups(gold)) or _ALTERNATIVE.search(_without_groups(gold)):
        return False
    if _are_products(gold, answer):
        return False
    letters = [re.sub(r"\\[a-zA-Z]+|[^a-zA-Z]", "", _without_groups(text)).lower() for text in (gold, answer)]
    return letters[0] != letters[1] and sorted(letters[0]) == sorted(letters[1])


def _are_products(*texts: str) -> bool:
    return all(_PRODUCT.fullmatch(text) for text in texts)


def _letters(text: str) -> set[str] | None:
    r"""The letters of a list or a set of single ones, such as `\text{A and C}`, `(A), (C)` and `\{a, c\}`."""
    text = _without_groups(text).strip()
    items = _BETWEEN_ITEMS.split(text.removeprefix(r"\{").removesuffix(r"\}").strip())
    is_list = len(items) > 1 and all(_ITEM.fullmatch(item) for item in items)
    return {item.strip("()").lower() for item in items} if is_list else None


def _has_neighbours(text: str) -> bool:
    return _NEIGHBOURS.search(_ARGUMENTS.sub("#", text.replace(r"\left", "").replace(r"\right", ""))) is not None


def _braces_match(text: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    return depth == 0
