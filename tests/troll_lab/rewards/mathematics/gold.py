"""The real problems whose gold answers the mathematics reward is held to, and ways to spoil an answer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tests.troll_lab.rewards.datasets import DATA, rows
from troll_lab.rewards.answers import AnswerFormat, final_answer

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


def spoiled(gold: str) -> Iterator[str]:
    """Wrong answers that something was done to."""
    value = number(gold)
    if value is None:
        yield from (f"({gold}) + 1", f"-({gold})", f"{gold}, 1234567")
        return
    mantissa, exponent = re.fullmatch(r"([^eE]*)(.*)", gold).groups()  # type: ignore[union-attr]
    yield from (_text(value + 1), _text(value - 1))
    yield from (f"{gold}, 1234567", rf"{gold} \text{{ or }} 1234567", rf"1234567 \text{{, not }} {gold}")
    yield from (rf"{gold} \text{{ or 1234567}}", f"1234567 = {gold}", rf"{gold} \approx 1234567", f"x > {gold}")
    yield _text(value - 1) + " 1"  # neighbours
    yield mantissa + (".7" if mantissa == "0" else "7") + exponent
    if value:
        yield mantissa[1:] + exponent if value < 0 else f"-{gold.lstrip('+')}"
        yield from (_text(value * 10) + r" \text{ cm}", _text(value * 1000) + " m", _text(value / 10))
        dropped = mantissa.replace(",", "")[:-1].rstrip(".") + exponent
        if len(mantissa.strip("+-")) > 1 and Fraction(dropped) != value:
            yield dropped


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.17g}" if abs(value) >= 1e-4 else f"{float(value):.15e}"
