"""The texts of answers before parsing: drops units, compares texts that need no parser, finds ambiguous answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from troll_lab.rewards.mathematics.notation import canonical, partners_of

#: Longer texts are not compared: the longest gold answer in the tasks' data sets has a few hundred characters.
MAX_CHARACTERS = 2000
#: A number without an exponent and thousands separators.
PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)

_NUMBER = re.compile(r"[+-]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,3})(?![\w.])", re.ASCII)
_THOUSANDS = re.compile(r"(?:(?<![\w,.(\[{^])|(?<=frac\{)|(?<=\}\{))[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)", re.ASCII)
_MIXED_NUMBER = re.compile(r"(?<![\d.,])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", re.ASCII)
_APPROXIMATELY = re.compile(r"[≈≃≅≊≋]|\\(?:approx|simeq|cong|sim)\b")
_STOP_IN_TEXT = re.compile(r"(?<=[\w)])\.(?=\}$)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z]).*")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?) *\^\{\\circ\}", re.ASCII)
_FRACTION_OF = re.compile(
    r"(?<![\w.)}\]^/])(\d+) */ *(\d+)"
    r"(?= *(?:[A-Za-z(|]|\\(?:pi|sqrt|[a-z]?theta|alpha|beta|mathcal|sin|cos|tan|ln|log)))"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}", re.ASCII)
_PERCENT = re.compile(r"(?<=[\d}]) *(?:\\%|percent\b|pct\b|\\text\{ *(?:percent|pct) *\})")
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^}])[1-9]\d{0,2}(?: \d{3})+(?! ?\d)", re.ASCII)
# Letters that stand for a unit after a number, and words that do not stand for a product of variables.
_UNIT_LETTERS = set("mstgldhcLNJWVACFKTMSHG")
_UNIT_WORDS = {
    "km", "cm", "mm", "nm", "ml", "mL", "kg", "mg", "gm", "lb", "lbs", "oz", "ft", "in", "yd", "mi", "mph", "kmh",
    "kmph", "ms", "ns", "hr", "hrs", "min", "mins", "sec", "secs", "day", "gal", "Hz", "kHz", "MHz", "GHz", "Pa", "kPa",
    "MPa", "kN", "kJ", "MJ", "kW", "MW", "kWh", "eV", "keV", "MeV", "GeV", "mol", "rad", "deg", "ohm", "cal", "bar",
    "atm", "USD", "EUR", "GBP", "men", "sq", "cu", "rs", "cc", "dm", "pc", "kpc", "Mpc", "ly", "au", "AU", "erg", "dB",
    "rpm", "yr", "yrs", "kB", "MB", "GB", "Wb", "mM", "ppm", "kph",
}  # fmt: skip
_OPERATOR = re.compile(r"\\(?:cdot|times|div|pm|le|ge|neq|in|cup|cap|lor|land|approx|to)$")
_MAY_BE_A_PRODUCT = {"nm", "ml", "mg", "gm", "ms", "ns", "cc", "dm", "rs", "pc", "ly", "au", "yr"}
_KNOWN_WORD = re.compile(
    r"(?:hour|minute|second|day|week|month|year|meter|metre|inche|feet|foot|mile|yard|liter|litre|gallon|gram|pound|degree"
    r"|dollar|cent|euro|unit|point|student|women|apple|coin|tile|edge|acre|rupee|square|radian)s?"
)
# A text must not match in two ways: repeating it would take exponential time. So `{-` is only where `-` is not.
_EXACT = r"\\(?:frac|sqrt|pi|cdot|times|binom)(?![A-Za-z])|\^\{-?\d+\}|[\d.,{}/*!\[\] ]"
_PURE = rf"[+-]?(?:{_EXACT}|\{{-|\((?:{_EXACT}|[-+])*\))*(?<=[\d.)}}!\]i])(?:\\%)?"
_UNIT_TEXT = r"\\text\{(?:[^{}\d^,?+*]|(?<=[A-Za-z])\*(?=[A-Za-z])|\^(?:-?\d|\{-?\d\}|\{?\\circ\}?))*\}"
_UNIT = rf"(?:{_UNIT_TEXT}|\\(?:mu|Omega|cdot|times)(?![a-z])|\^\{{(?:-?\d|\\circ)\}}|[ /A-Za-z*€£¥₹¢])"
_QUANTITY = re.compile(
    rf"((?:[^=<>]*=)? *{_PURE})(?!\^\{{-?\d)((?:{_UNIT}|\\frac\{{{_UNIT}+\}}\{{{_UNIT}+\}})*)", re.ASCII
)
_NAMED_UNIT = re.compile(rf"(?:\^\{{\\circ\}})?(?: *(?:(?:/|\\cdot) *)?{_UNIT_TEXT}(?:\^\{{-?\d\}})?)+$")
_IS_PURE = re.compile(rf"(?:[^=<>]*=)?(?:{_EXACT}|[-+()]|\\%)*")
_TIME = re.compile(r"0?(\d{1,2})(?::(\d\d)\s*(?:([ap])\.?\s?m\.?)?|\s*([ap])\.?\s?m\.?)", re.ASCII)
# Letters and digits in a row, such as a number in base 16 or a formula of chemistry, but not 1e5.
_CODE = re.compile(r"(?!\d+e\d+$)[a-z\d]*[a-z]\d[a-z\d]*")
_BASE = re.compile(r"_\{?\w+\}?$")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(?<![\w.,/^)}}])(\d[\d,]*(?:\.\d+)?)( *(?:\\text\{{ *)?)({'|'.join(_SCALES)})s?(?![A-Za-z-])",
    re.ASCII | re.IGNORECASE,
)
_LETTERS = re.compile(r"[A-Za-z\s()]{2,}")
# Letters that are variables in most mathematics, and seldom make a word.
_PRODUCT = re.compile(r"(?:[a-df-hj-np-tv-z](?:\s|\\cdot(?![a-z]))*){2,5}")
_BETWEEN_ITEMS = re.compile(r"\s*(?:,\s*and\b|,|;|\band\b)\s*")
_ITEM = re.compile(r"[A-Za-z]|\([A-Za-z]\)")
_PRIMES = re.compile(r"(?<=[A-Za-z)\]}])'+(?!s)")
_POINT = re.compile(r"(?<=\d)\.(?=\s*[/*)+-])", re.ASCII)  # of 1./3, which math-verify does not read
_NUMBER_BASE = re.compile(r"\d\s*_\s*(\{[^{}]*\}|\S)")
_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_MULTIPLIER = re.compile(r"\\text\{ *(?:k|bn|mn|mil) *\}$")
_ALTERNATIVE = re.compile(r"\b(?:and|or|nor|not)\b", re.IGNORECASE)
# Not before a hyphen, as in `two-liter bottles`; `thirds`, but `third graders`; `squared`, but `cm squared`.
_ARITHMETIC = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:hundred|thousand|(?:m|b|tr)illion|dozen|lakh|crore)s?|twice|halves"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s"
    r"|tens|gross|doubled|tripled|powers?|plus|minus|divided|multiplied)\b(?!-)|^\W*(?:half|squared|cubed|factorial)\b",
    re.IGNORECASE,
)


_PART = re.compile(r"halves|\w*(?:rd|th)s|lakhs?|crores?")


def tidy(text: str) -> str:
    """Writes an answer in one notation, without signs that do not change its value."""
    text = canonical(text.strip("\u200b\ufeff").rstrip("\\ ")).rstrip("\\ ,;:").lstrip("= ")
    text = re.sub(r"^\\approx(?![a-z]) *", "", text)  # at the start, it names one value
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _STOP_IN_TEXT.sub("", text.lstrip("€£¥₹"))
    text = re.sub(r"(?<=\d) ?x ?(?=10\^)", r" \\times ", text)
    # Elsewhere degrees are a unit.
    text = _TRIGONOMETRIC.sub(lambda match: _DEGREES.sub(r"\\frac{\1\\pi}{180}", match[0]), text)
    text = _PRIMES.sub(lambda match: "^{" + r"\prime" * len(match[0]) + "}", text)  # an apostrophe is dropped
    text = _POINT.sub("", _PERCENT.sub(r"\\%", _REPEATING.sub(_as_fraction, text)))
    text = _FRACTION_OF.sub(r"\\frac{\1}{\2}", _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text))
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    while (scaled := _SCALED.sub(_multiplied, text)) != text:  # 2 hundred thousand
        text = re.sub(r"\\text\{ *\}", "", scaled).rstrip()
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _multiplied(match: re.Match[str]) -> str:
    return format(Decimal(match[1].replace(",", "")).scaleb(_SCALES[match[3].lower()]), "f") + match[2]


def _as_fraction(match: re.Match[str]) -> str:
    whole, start, period = match.groups()
    value = Fraction(int(whole + start + period) - int("0" + whole + start), 10 ** len(start) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def same_at_sight(gold: str, answer: str) -> bool | None:
    """Whether two tidy texts are the same answer; None if only the parser can tell."""
    if not answer or len(answer) > MAX_CHARACTERS or len(gold) > MAX_CHARACTERS:
        return bool(answer) and answer == gold
    if answer == gold:
        return True
    expected_values, given_values = _values(gold), _values(answer)
    if expected_values and given_values:
        either = len(expected_values) != len(given_values) and not set(expected_values).isdisjoint(given_values)
        return expected_values[0] == given_values[0] or either
    expected, given = (
        _TIME.fullmatch(_with_plain_words(text).rpartition("=")[2].strip().lower()) for text in (gold, answer)
    )
    if expected and given:
        times = [(time[1], time[2] or "00") for time in (expected, given)]
        return times[0] == times[1] and {time[3] or time[4] for time in (expected, given)} != {"a", "p"}
    if expected and expected[2]:  # the parser would divide
        return False
    words = _word(gold), _word(answer)
    if words[0] and words[0] == words[1]:
        return True
    expected_letters, given_letters = _letters(gold), _letters(answer)
    if expected_letters and given_letters:
        same_set = r"\{" in gold and set(expected_letters) == set(given_letters)
        return expected_letters == given_letters or same_set
    if _is_ambiguous(gold, answer):
        return False
    code = _code(gold)
    return code == _code(answer) if code else None


def without_units(gold: str, answer: str) -> tuple[str, str]:
    r"""Drops the units of two tidy texts, which are not compared.

    `\text{}` after a value is a unit. Letters and words without it are units after a plain number only,
    in a gold answer only those that cannot be a product, and in an answer only where the gold one is a plain number:
    in `10 - 2t` and `\frac{1}{2} m`, letters are symbols.
    """
    # The parser takes the e of 4.5e33 for Euler's.
    gold, answer = (
        _SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text) for text in (gold, answer)
    )
    quantity = _QUANTITY.fullmatch(gold)
    if quantity and _is_unit(quantity[2], _is_known_word):
        gold = quantity[1].rstrip()
    value = _without_named_unit(gold)
    if _IS_PURE.fullmatch(value):
        quantity = _QUANTITY.fullmatch(answer)
        if quantity and _is_unit(quantity[2], _may_be_a_unit):
            return value, quantity[1].rstrip()
    letters = re.search(r"(?<![A-Za-z\\])[A-Za-z]+$", value)
    if letters and re.search(rf"\\text\{{ *{letters[0]} *\}}$", answer):  # the answer says that it is a unit
        return value, _WORDS.sub(r" \1", answer)
    return value, _without_named_unit(answer)


def _is_known_word(word: str) -> bool:
    return (word in _UNIT_WORDS and word not in _MAY_BE_A_PRODUCT) or _KNOWN_WORD.fullmatch(word) is not None


def _may_be_a_unit(word: str) -> bool:
    is_word = len(word) >= 4 and word[1:].islower() and not _ARITHMETIC.search(word)
    return word in _UNIT_LETTERS or word in _UNIT_WORDS or is_word


def _is_unit(text: str, is_word: Callable[[str], bool]) -> bool:
    words = re.findall(r"[A-Za-z]+", re.sub(rf"{_UNIT_TEXT}|\\[a-zA-Z]+", " ", text))
    if not (_UNIT_LETTERS | {"k"}).issuperset(re.findall(r"\\text\{ *([A-Za-z]) *\}", text)):
        return False
    if text.strip() and not re.search(r"[A-Za-z€£¥₹¢]|\\circ", re.sub(r"\\(?:cdot|times)", "", text)):
        return False
    return all(map(is_word, words)) and len(words) <= 3 and not re.search(r"(?:[/*]|\\cdot|\\times) *$", text)


def _without_named_unit(text: str) -> str:
    unit = _NAMED_UNIT.search(text)
    if unit is None:
        return text
    value = text[: unit.start()].rstrip()
    return (
        text
        if not value or not _is_unit(unit[0], bool) or value[-1] in "=<>+-*/^_(,;&|" or _OPERATOR.search(value)
        else value
    )


def _values(text: str) -> list[Decimal]:
    """The value of a plain number; of a percentage, its number and its fraction."""
    digits = text.removesuffix(r"\%")
    if not _NUMBER.fullmatch(digits):
        return []
    value = Decimal(digits.replace(",", ""))
    return [value] if digits == text else [value, value.scaleb(-2)]


def _with_plain_words(text: str) -> str:
    r"""The text with its `\text{...}` as plain words."""
    return _WORDS.sub(r"\1", text)


def _is_ambiguous(gold: str, answer: str) -> bool:
    r"""Whether an answer has more than the one value that would be read from it.

    - a box within the answer, a phantom, or braces that do not match: only a part would be read;
    - `18 \approx 20`: the parser reads the left side. Allowed where the gold answer is approximate itself;
    - `1011_3`: the parser ignores the base of a number. Allowed where the gold answer has the same;
    - `18 \text{ or twenty}`, `\text{not } 18`: the text would be a unit. `1 \text{ or } 2` is a list of two;
    - `18 \text{ tenths}`, `18 \text{k}`, `18 \text{ plus two}`: this would be a unit too. Allowed where the gold answer
      has the same words. Of these, the answer has to repeat fractions, such as the tenths of a gold answer;
    - `CBA` for `ABC`: letters are factors, in any order, which is right only for products such as `xy` and `yx`.
    """
    if any(command in answer for command in (r"\boxed", r"\fbox", "phantom")) or partners_of(answer) is None:
        return True
    if any(sign.search(answer) and not sign.search(gold) for sign in (_APPROXIMATELY, _MULTIPLIER)):
        return True
    bases = [{base.strip("{} ") for base in _NUMBER_BASE.findall(text)} for text in (gold, answer)]
    if bases[1] and bases[0] != bases[1]:
        return True
    if _is_anagram(gold, answer):
        return True
    groups = [words.strip() for words in _WORDS.findall(answer)]
    if any(_ALTERNATIVE.search(words) and words.strip(" ,").lower() not in ("and", "or") for words in groups):
        return True
    said, expected = _arithmetic(answer), _arithmetic(gold)
    return not said <= expected or any(_PART.fullmatch(word) for word in expected - said)


def _arithmetic(text: str) -> set[str]:
    return {found.strip().lower() for words in _WORDS.findall(text) for found in _ARITHMETIC.findall(words)}


def _is_anagram(gold: str, answer: str) -> bool:
    if not _LETTERS.fullmatch(_with_plain_words(gold)) or _ALTERNATIVE.search(_with_plain_words(gold)):
        return False
    if _PRODUCT.fullmatch(gold) and _PRODUCT.fullmatch(answer):
        return False
    texts = [re.sub(r"\\cdot|[\s()]", "", _with_plain_words(text)).lower() for text in (gold, answer)]
    return texts[0] != texts[1] and sorted(texts[0]) == sorted(texts[1])


def _code(text: str) -> str | None:
    """Letters and digits in a row, in which the order counts, with small letters and without a number's base."""
    word = _BASE.sub("", text)
    inside = _WORDS.fullmatch(word)
    code = inside[1].strip() if inside else word
    is_product = code.islower() and word == text  # x2 may be a sloppy 2x
    return code.lower() if _CODE.fullmatch(code.lower()) and not is_product else None


def _word(text: str) -> str | None:
    r"""A word, or a letter in parentheses, as in `\text{(B)}`, with small letters and without spaces."""
    word = re.sub(r"\s|^\s*\(|(?<=^\([A-Za-z])\)\s*$", "", _with_plain_words(text))
    return word.lower() if re.fullmatch("[A-Za-z]+|[A-Za-z]{2,}[0-9]+", word) else None


def _letters(text: str) -> list[str] | None:
    r"""The letters, sorted, of a list or a set of single ones, such as `\text{A and C}`, `(A), (C)` and `\{a, c\}`."""
    text = _with_plain_words(text).strip()
    items = _BETWEEN_ITEMS.split(text.removeprefix(r"\{").removesuffix(r"\}").strip())
    is_list = len(items) > 1 and all(_ITEM.fullmatch(item) for item in items)
    return sorted(item.strip("()").lower() for item in items) if is_list else None
