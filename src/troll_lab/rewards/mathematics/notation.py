r"""Converts the notations of LaTeX, Unicode and programs to one: `\tfrac12`, `½` and `{1 \over 2}` become the same."""

from __future__ import annotations

import contextlib
import re
import unicodedata

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CHARACTERS = {
    "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "√": r"\sqrt*",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∨": r"\lor ", "∧": r"\land ", "∞": r"\infty ",
    "°": r"^{\circ}", "º": r"^{\circ}", "℃": r"^{\circ}C", "′": "'", "’": "'", "⁄": "/", "∕": "/", "µ": r"\mu ",
    "Ω": r"\Omega ", "ϕ": r"\phi ", "ħ": r"\hbar ",
}  # fmt: skip
_CHARACTERS |= {
    letter: "\\" + (name.lower() if letter.islower() else name.title()) + " "
    for letter in "αβγδεζηθκλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ"
    for name in [unicodedata.name(letter).split()[-1].replace("LAMDA", "LAMBDA")]
}
_CHARACTER = re.compile(f"[{''.join(_CHARACTERS)}]")
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|sc|up|normal)?|emph|rm|mathrm|mbox|hbox|operatorname|unit|si)(?![A-Za-z])\*?"
_FONT = r"\\(?:math(?:it|bf|sf|tt|normal)|boldsymbol|bm|pmb)(?![A-Za-z])"
_PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=,) *\\! *(?=\d)|\\!|(?<![A-Za-z}\]])\{ *\}", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|en)space|\s", " "),
        (r"\\\\ *\[[^\]]*\]", r"\\\\"),
        (r"\\(?:left|right)\.|\\(?:[hv]space|(?:text)?color) *\*?(?:\[\w+\])?\{[^{}]*\}", ""),
        (r"\\{1,2}(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])|\\[()$]|\\\[|(?<!\\)\\\]|\$", ""),
        (r"\{ *\\(?:rm|mathrm|textrm)(?![A-Za-z]) *([^{}]*)\}", r"\\text{\1}"),
        (rf"\{{ *({_TEXT} *\{{[^{{}}]*\}}) *\}}", r"\1"),
        (r"\\rm +([A-Za-z]+)$", r"\\text{\1}"),
        (rf"{_TEXT} *([A-Za-z])(?![A-Za-z])", r"\\text{\1}"),
        (rf"{_FONT} *\{{ *([a-z]{{2,}}|[A-Za-z]{{3,}}) *\}}", r"\\text{\1}"),
        (_FONT, ""),
        (r"\\(hat|bar|d?dot|tilde|vec|overline)(?![A-Za-z]) *(\\[A-Za-z]+|\w)", r"\\\1{\2}"),
        (r"\\(begin|end)\{(?:smallmatrix|array)\}(?:(?<=begin\{array\})\{[^{}]*\})?", r"\\\1{matrix}"),
        (r"\{ *([,:]) *\}", r"\1"),
    )
]
_LOOKS = {
    "displaystyle", "textstyle", "scriptstyle", "limits", "tiny", "small", "normalsize", "large", "Large", "LARGE",
    "huge", "Huge", "bf", "it", "sf", "tt", "rm", "bfseries", "itshape", "strut", "hfill", "underline", "uline",
    "ensuremath", "mathop", "mathord", "num", "smash", "scriptsize", "footnotesize", "pounds", "textdollar",
}  # fmt: skip
_NAMES = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "flatfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"), **dict.fromkeys(("leq", "leqslant", "leqq"), r"\le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), r"\ge"), "ne": r"\neq", "lt": "<", "gt": ">", "lbrace": r"\{",
    "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "langle": "(", "rangle": ")", "ast": r"\cdot",
    **dict.fromkeys(("lvert", "rvert", "vert"), "|"),
    "degree": r"^{\circ}", "varnothing": r"\emptyset", "vee": r"\lor", "wedge": r"\land", "tg": r"\tan",
    "cosec": r"\csc", "imath": "i", "bmod": r"\mod", **dict.fromkeys(("dots", "cdots", "dotsc", "dotsb"), r"\ldots"),
    **{f"var{name}": rf"\{name}" for name in ("epsilon", "phi", "theta", "rho", "sigma")}, "lg": r"\log_{10}",
    # To math-verify's parser both are Euler's constant.
    "gamma": r"\mathcal{gamma}", "Gamma": r"\mathcal{Gamma}",
}  # fmt: skip
_SIGNS = {"**": "^", "<=": r"\le ", ">=": r"\ge ", "!=": r"\neq ", "==": "=", "%": r"\%"}
# Names in programs, except Greek letters that may also be products.
_FUNCTIONS = {
    **{name: rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "ln", "log")},
    **{name: rf"\arc{name[-3:]}" for name in ("asin", "acos", "atan", "arcsin", "arccos", "arctan")},
    **{name: rf"\{name}" for name in ("pi", "alpha", "beta", "delta", "theta", "lambda", "sigma", "omega", "phi", "rho",
                                   "epsilon", "hbar")},
    **dict.fromkeys(("oo", "inf", "infty", "infinity"), r"\infty"), "sqrt": r"\sqrt*", "exp": "e^", "abs": r"\abs",
    "floor": r"\floor", "ceil": r"\ceil", "max": r"\max", "min": r"\min", "gcd": r"\gcd",
    "log10": r"\log_{10}", "log2": r"\log_{2}",
}  # fmt: skip
_NEED_PARENTHESES = ("floor", "ceil", "max", "min", "gcd")
_NAME = re.compile(
    r"\\(?:math(?:cal|bb|frak|scr)|vec|hat|bar|d?dot|tilde|over(?:line|rightarrow)|wide(?:hat|tilde)) *\{\w*\}"
    rf"|(?P<text>{_TEXT}) *\{{(?P<words>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}|\\(?P<command>[A-Za-z]+)|\\."
    r"|(?P<sign>\*\*|[<>!=]=|%)|(?:(?P<module>np|numpy|math|sympy)\.)?(?P<word>[A-Za-z]+(?:(?<=log)(?:10|2)(?=\())?)"
)
_TAKES_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt|abs|floor|ceil)(?![A-Za-z])(\*?)|([\^_])")
# A letter that the parser would take for a differential.
_D = re.compile(r"\\[A-Za-z]+|(?<!an)d *(?=\\(?:cdot|times|div|sqrt|frac|sin|cos|tan|ln|log|pi)(?![A-Za-z]))")
_INSIDE = r"[^{}]*"
for _ in range(4):
    _INSIDE = rf"(?:[^{{}}]|\{{{_INSIDE}\}})*"
_INFIX = re.compile(rf"\{{({_INSIDE})\\(over|choose)(?![A-Za-z])({_INSIDE})\}}")
# A group that is not an argument: at the start, or after an operator.
_GROUP = re.compile(r"(?:^|(?<=[-+*/=(,<>|&])) *(\{)")
_WHOLE = re.compile(r"\d*\.?\d+|(?<=_)[a-z]{3,}", re.ASCII)
#: A command, a character, or an escaped one.
TOKEN = re.compile(r"\\[A-Za-z]+|\\?.", re.DOTALL)
_DEGREE = re.compile(r" *\[[^\[\]]*\]")
_NOT_AFTER_SYMBOL = re.compile(r"\\(?:log|lim|sum|prod|int|max|min|sup|inf) *$")


def canonical(text: str) -> str:
    r"""Writes a mathematical text in one notation, e.g. `\sfrac12`, `½` and `{1 \over 2}` as `\frac{1}{2}`.

    Commands that only change the look are dropped. The content of `\text{}` is not changed. If braces do not match,
    arguments and groups are not changed.
    """
    text = re.sub(r"(?<=[\w)\]}])[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[₀-₉]+", lambda found: f"_{{{found[0].translate(_LOWERED)}}}", text)
    text = re.sub(r"\s*([¼½¾⅐-⅞])", _vulgar, text)
    text = _CHARACTER.sub(lambda found: _CHARACTERS[found[0]], text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)  # a backslash that was escaped once too often
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    if r"\over" in text or r"\choose" in text:
        infix = {"over": "frac", "choose": "binom"}
        text = _INFIX.sub(lambda found: rf"{{\{infix[found[2]]}{{{found[1]}}}{{{found[3]}}}}}", f"{{{text}}}")[1:-1]
    text = _D.sub(lambda found: found[0] if found[0].startswith("\\") else "(d) ", text)
    text = _NAME.sub(_renamed, text).strip()
    partners = partners_of(text)
    if partners is not None:
        text = _without_groups(text, partners)
        with contextlib.suppress(RecursionError):  # hundreds of nested powers, which no real answer has
            text = _with_arguments(text, 0, len(text), partners)
    return re.sub(" +", " ", text).strip()


def _vulgar(found: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", found[1]).partition("⁄")
    return rf"\frac{{{over}}}{{{under}}}"


def _renamed(found: re.Match[str]) -> str:
    rest = found.string[found.end() : found.end() + 1]
    if found["text"]:
        words = found["words"].strip()
        if words in _FUNCTIONS:
            return _FUNCTIONS[words]
        if re.search(r"(?<![\\A-Za-z])[A-Za-z]", words) and words not in ("e", "i", "d"):
            value = re.fullmatch(r"(\d[\d.,]*) *([^\d]+)", words)
            return rf"{value[1]} \text{{ {value[2]}}}" if value else rf"\text{{{found['words']}}}"
        return f" {_NAME.sub(_renamed, words)} "
    if found["command"]:
        name = found["command"]
        if name in _LOOKS:
            return ""
        return found[0] if name == "Gamma" and rest == "(" else _NAMES.get(name, found[0])
    if found["sign"]:
        return _SIGNS[found["sign"]]
    word = found["word"]
    if word is None:
        return found[0]
    before, after = found.string[: found.start()].rstrip()[-1:], found.string[found.end() :].lstrip()[:1]
    if word in ("U", "union") and before in (")", "]") and after in ("(", "["):
        return r"\cup "
    if (word in _NEED_PARENTHESES and rest != "(" and before != "_") or (
        word == "sec" and (not after or before == "/")
    ):
        return word
    if word in _FUNCTIONS:
        return r"\ln" if found["module"] and word == "log" else _FUNCTIONS[word]
    # The parser takes I for the imaginary unit and tr for a trace, and cannot read an index of e.
    word = word.replace("tr", "t r") if len(word) <= 4 else word
    if rest == "_" and word[-1] in "eE":
        word = rf"{word[:-1]}\mathcal{{{word[-1]}}}"
    return word.replace("I", r"\mathcal{I}") if len(word) <= 2 and rest != "(" else word


def partners_of(text: str) -> dict[int, int] | None:
    """Where each opening brace and parenthesis is closed; None if braces do not match."""
    partners, opened = {}, list[int]()
    for found in re.finditer(r"\\.|([{}()])", text, re.DOTALL):
        if found[1] in ("{", "("):
            opened.append(found.start())
        elif found[1] == ")" and opened and text[opened[-1]] == "(":
            partners[opened.pop()] = found.start()
        elif found[1] == "}":
            while opened and text[opened[-1]] == "(":
                opened.pop()
            if not opened:
                return None
            partners[opened.pop()] = found.start()
    return None if any(text[at] == "{" for at in opened) else partners


def _without_groups(text: str, partners: dict[int, int]) -> str:
    """The text with spaces or parentheses instead of the braces of groups, which the parser would take for sets."""
    start, end = 0, len(text) - 1
    characters = list(text)
    while start < end and text[start] == "{" and partners[start] == end:
        characters[start] = characters[end] = " "
        start, end = start + 1, end - 1
    for found in _GROUP.finditer(text, start, end):
        opened, closed = found.start(1), partners[found.start(1)]
        inside = text[opened + 1 : closed]
        if re.fullmatch(r"[\w. ]*", inside):
            characters[opened] = characters[closed] = " "
        elif "," not in inside:
            characters[opened], characters[closed] = "()"
    return "".join(characters)


def _with_arguments(text: str, start: int, end: int, partners: dict[int, int]) -> str:
    """The text between two places with every argument in braces."""
    parts = []
    while found := _TAKES_ARGUMENTS.search(text, start, end):
        parts.append(text[start : found.start()])
        start, arguments, name = found.end(), list[str](), found[1] or found[3]
        is_index = name == "_" and not _NOT_AFTER_SYMBOL.search(parts[-1])
        # In `\log_28` the base is 2, as TeX has it; `x^10` is how programs write it.
        is_whole = bool(found[2] or name == "^" or is_index or text.startswith("10", start))
        degree = _DEGREE.match(text, start, end) if name == "sqrt" else None
        start = degree.end() if degree else start
        for _ in range(1 + (name in ("frac", "binom"))):
            first, last, start = _argument(text, start, end, partners, is_whole)
            arguments.append(_with_arguments(text, first, last, partners).strip())
        if is_index and re.fullmatch(r"[\w+\-,=]+", flat := re.sub(r"\\text|[\\{} ]", "", arguments[0])):
            arguments = [flat]
        command = (found[3] or rf"\{name}") + (degree[0] if degree else "")
        around = {"abs": "||", "floor": (r"\lfloor ", r"\rfloor "), "ceil": (r"\lceil ", r"\rceil ")}.get(name)
        parts += [around[0], *arguments, around[1]] if around else [command, *(f"{{{one}}}" for one in arguments)]
    return "".join([*parts, text[start:end]])


def _argument(text: str, at: int, end: int, partners: dict[int, int], is_whole: bool) -> tuple[int, int, int]:
    """Where the argument at a place starts and ends, and where the text goes on: a group, a token, or a number."""
    while at < end and text[at] == " ":
        at += 1
    if at in partners and partners[at] < end:
        return at + 1, partners[at], partners[at] + 1
    if is_whole and text[at : at + 1] in ("+", "-"):
        after = _argument(text, at + 1, end, partners, is_whole)[2]
        return at, after, after
    found = (is_whole and _WHOLE.match(text, at, end)) or TOKEN.match(text, at, end)
    after = found.end() if found else at
    command = _TAKES_ARGUMENTS.fullmatch(text, at, after)
    for _ in range(1 + (command[1] in ("frac", "binom")) if command and command[1] else 0):
        after = _argument(text, after, end, partners, is_whole=False)[2]
    if text[at:after] == r"\text" and after in partners:
        after = partners[after] + 1
    return at, after, after
