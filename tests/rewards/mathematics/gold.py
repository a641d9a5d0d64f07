"""The real problems whose gold answers the mathematics reward is held to, and ways to spoil an answer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tests.rewards.datasets import DATA, rows
from troll.rewards.answers import AnswerFormat, final_answer

FILES = {
    "gsm8k-train": DATA / "gsm8k" / "train.jsonl",
    "gsm8k-test": DATA / "gsm8k" / "test.jsonl",
    "aime24": DATA / "math_eval" / "aime24.jsonl",
    "amc23": DATA / "math_eval" / "amc23.jsonl",
    "minerva_math": DATA / "math_eval" / "minerva_math.jsonl",
}
ROWS = {"gsm8k-train": 7473, "gsm8k-test": 1319, "aime24": 30, "amc23": 40, "minerva_math": 272}

MARKED = {"boxed": r"\boxed{%s}", "hash": "#### %s", "tag": "<answer>%s</answer>"}


@dataclass(frozen=True)
class Problem:
    """A solution without its final answer, and that answer."""

    solution: str
    gold: str

    def solved(self, answer_format: AnswerFormat, answer: str | None = None) -> str:
        """The whole solution, ending in an answer, its gold one by default."""
        return self.solution + "\n" + MARKED[answer_format] % (self.gold if answer is None else answer)


@lru_cache
def problems(name: str) -> list[Problem]:
    return [_problem(name, row) for row in rows(FILES[name])]


def _problem(name: str, row: dict) -> Problem:
    if name.startswith("gsm8k"):
        solution, _, gold = row["answer"].rpartition("####")
        return Problem(solution, gold.strip())
    if name == "minerva_math":
        gold = final_answer(row["solution"])
        assert gold is not None
        return Problem(row["solution"], gold)
    return Problem(row.get("solution", row["problem"]), str(row["answer"]))


def number(gold: str) -> Fraction | None:
    text = gold.replace(",", "")
    return Fraction(text) if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", text) else None


def spoiled(gold: str) -> Iterator[tuple[str, str]]:
    """What was done to an answer, and the wrong answer that came of it."""
    value = number(gold)
    if value is None:
        yield "one more", f"({gold}) + 1"
        yield "sign", f"-({gold})"
        yield "list", f"{gold}, 1234567"
        return
    mantissa, exponent = re.fullmatch(r"([^eE]*)(.*)", gold).groups()  # type: ignore[union-attr]
    yield "one more", _text(value + 1)
    yield "one less", _text(value - 1)
    yield "list", f"{gold}, 1234567"
    yield "alternative", rf"{gold} \text{{ or }} 1234567"
    yield "words", rf"1234567 \text{{, not }} {gold}"
    yield "swallowed", rf"{gold} \text{{ or 1234567}}"
    yield "chain", f"1234567 = {gold}"
    yield "approximation", rf"{gold} \approx 1234567"
    yield "relation", f"x > {gold}"
    yield "neighbours", _text(value - 1) + " 1"
    yield "digit appended", mantissa + ("7" if "." in mantissa else "0.7"[1:] if mantissa == "0" else "7") + exponent
    if value:
        yield "sign", mantissa[1:] + exponent if value < 0 else f"-{gold.lstrip('+')}"
        yield "ten times, with a unit", _text(value * 10) + r" \text{ cm}"
        yield "thousand times, with a unit", _text(value * 1000) + " m"
        yield "a tenth", _text(value / 10)
    if (
        value
        and len(mantissa.strip("+-")) > 1
        and Fraction(mantissa.replace(",", "")[:-1].rstrip(".") + exponent or 0) != value
    ):
        yield "digit dropped", mantissa.replace(",", "")[:-1].rstrip(".") + exponent


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.17g}" if abs(value) >= 1e-4 else f"{float(value):.15e}"
