r"""Whether two mathematical answers are the same: math-verify's judgement, within limits that hold everywhere.

math-verify parses and compares, in processes of its own (`equivalence_pool.py`): its time limits are signals, which
only a main thread can receive and which no long operation on integers obeys. There, the kernel counts the CPU time of
every comparison, so a busy machine changes no verdict, and bounds the memory.

Two plain numbers are compared here, exactly and without a process: `72`, `72.00`, `\$72`, `1,000`. That is stricter
than math-verify, which rounds to six decimals; expressions such as `\frac{1}{3}` and `0.333333` are left to it.
As with math-verify, a unit is not compared (`18 km` and `18 m` are equal), and a percentage equals its number and its
fraction (`50\%`, `50`, `0.5`). Times of day are compared as text. Some answers are refused that math-verify would read
as one number: see `is_ambiguous` here, and `equality.py`.

Known limits, because a guard would need a parser or a dictionary:

- Granted: a letter that may be a multiplier for a unit (`18\text{k}`), a hedge in text (`18\text{, perhaps}`), dots
  (`18\ldots`), a name before the answer (`f(x) = 18`), a calculation left to do (`20 - 2`).
- Refused: sentences (`the answer is 18`), numbers in words, also in a unit (`18 \text{ in two hours}`), several words
  without `\text` (`18 years old`), `yx` for `xy`, `1 < x < 2` for `(1, 2)`, which may be a point.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec

from troll.rewards.equivalence_pool import Comparison, ask

#: Longer answers are no answers: the longest gold answer of the tasks' data sets has a few hundred characters.
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
_PRIMES = re.compile(r"(?<=[A-Za-z)\]}])'+(?!s)")
_NUMBER_BASE = re.compile(r"\d\s*_\s*(\{[^{}]*\}|\S)")
_ARGUMENTS = re.compile(r"\\[a-zA-Z]+\s*(?:\[[^\[\]]*\]\s*)?(?:\{[^{}]*\}\s*)+|[\^_]\s*\{[^{}]*\}")
_NEIGHBOURS = re.compile(r"(?<![_^\d.])\d[\d.]*(?:[\s(){}]|\\[,;:! %]|\\q?quad|\^\s*\\circ)+\d")
_WORDS = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))[a-z]*\s*\{([^{}]*)\}")
_ALTERNATIVE = re.compile(r"\b(?:and|or|nor|not)\b", re.IGNORECASE)
# Not before a hyphen, as in `two-liter bottles`; `thirds`, but `third graders`; `squared`, but `cm squared`.
_ARITHMETIC = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:hundred|thousand|(?:m|b|tr)illion|dozen)s?|halves"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s"
    r"|plus|minus|divided|multiplied)\b(?!-)|^\W*(?:half|squared|cubed|factorial)\b",
    re.IGNORECASE,
)


def check_math_verify() -> None:
    """Raises ImportError where math-verify is missing."""
    if find_spec("math_verify") is None:
        raise ImportError('math rewards need math-verify: pip install "troll-rl[tasks]"')


def compare(pairs: Sequence[tuple[str, str]], cpu_seconds: float = 2.0) -> list[Comparison]:
    """Compares answers to gold answers; a pair that comes twice is compared once.

    Args:
        pairs: N pairs of a gold answer and an answer, each without a box around it.
        cpu_seconds: CPU time that one comparison may take.

    Returns:
        N comparisons, in the order of the pairs.

    Raises:
        ImportError: If math-verify is not installed.
        RuntimeError: If its process cannot be started.
    """
    found: dict[tuple[str, str], Comparison] = {}
    questions: dict[tuple[str, str], tuple[str, str]] = {}
    for pair in set(pairs):
        gold, answer = (_tidy(text) if len(text) <= MAX_CHARACTERS else text for text in pair)
        decided = _at_sight(gold, answer)
        if decided is None:
            questions[pair] = (_for_math_verify(gold), _for_math_verify(_with_unit_as_text(answer)))
        else:
            found[pair] = decided
    if questions:
        check_math_verify()
        found.update(zip(questions, ask(list(questions.values()), cpu_seconds), strict=True))
    return [found[pair] for pair in pairs]


def _tidy(text: str) -> str:
    """Drops what says nothing of the value, and brings what has many spellings to the one that math-verify reads."""
    text = text.replace(r"\$", "").replace("$", "").replace("{,}", ",").replace("−", "-")
    text = text.replace("{:}", ":").replace("°", r"^\circ").replace(r"\degree", r"^\circ")
    text = re.sub(r"[\s~]", " ", text).strip().rstrip("\\ ")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _CURRENCY.sub("", _CHOICE_AND_STOP.sub(r"\1", text.lstrip("€£¥")))
    text = _PRIMES.sub(lambda match: "^{" + r"\prime" * len(match[0]) + "}", text)  # an apostrophe is dropped
    text = _PERCENT.sub(r"\\%", text)
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", _IMAGINARY.sub(" i", text))
    text = _FRACTION.sub(lambda match: rf"\frac{_braced(match[1])}{_braced(match[2])}", text)
    return _SPACED_THOUSANDS.sub(lambda match: re.sub(_SPACE, "", match[0]), text)


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def _for_math_verify(text: str) -> str:
    """Spells out two kinds of numbers that it misreads: the e of 4.5e33 as Euler's number, x = 1,000 as two values."""
    text = _SCIENTIFIC.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)
    return _EQUAL_TO_THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)


def _at_sight(gold: str, answer: str) -> Comparison | None:
    """The comparison where no parser is needed for it, else None."""
    if not answer or len(answer) > MAX_CHARACTERS or len(gold) > MAX_CHARACTERS:
        return Comparison.EQUAL if answer and answer == gold else Comparison.DIFFERENT
    if answer == gold:
        return Comparison.EQUAL
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(answer):
        equal = Decimal(gold.replace(",", "")) == Decimal(answer.replace(",", ""))
        return Comparison.EQUAL if equal else Comparison.DIFFERENT
    expected, given = (
        _TIME.fullmatch(_without_groups(text).rpartition("=")[2].strip().lower()) for text in (gold, answer)
    )
    if expected:  # math-verify would divide
        equal = given is not None and given[1] == expected[1] and {given[2], expected[2]} != {"a", "p"}
        return Comparison.EQUAL if equal else Comparison.DIFFERENT
    return Comparison.DIFFERENT if is_ambiguous(gold, answer) else None


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

    - a box within the answer, a phantom, or braces that do not match: math-verify would read a part;
    - `18 \approx 20`: it reads the left side. Allowed where the gold answer is approximate itself;
    - `1011_3`: it ignores the base of a number. Allowed where the gold answer has the same;
    - `10 8`, `10(8)`: it adds numbers side by side, as in `1\frac{1}{2}`. Allowed where the gold answer has some;
    - `18 \text{ or twenty}`, `\text{not } 18`: it takes text for a unit. `1 \text{ or } 2` is a list of two;
    - `18 \text{ million}`, `18 \text{ plus two}`: the same. Allowed where the gold answer has the same words;
    - `CBA` for `ABC`: letters are factors to it, in any order.
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
    letters = [re.sub(r"\\[a-zA-Z]+|[^a-zA-Z]", "", _without_groups(text)).lower() for text in (gold, answer)]
    return letters[0] != letters[1] and sorted(letters[0]) == sorted(letters[1])


def _has_neighbours(text: str) -> bool:
    return _NEIGHBOURS.search(_ARGUMENTS.sub("#", text.replace(r"\left", "").replace(r"\right", ""))) is not None


def _braces_match(text: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return False
    return depth == 0
