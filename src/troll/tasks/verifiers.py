"""Verifiers for data sets of reasoning-gym whose own ones pay wrong answers, run them as code, or take very long.

Each accepts the data set's own answers. What was found wrong stands next to each entry.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from troll.tasks.formulas import MAX_CHARACTERS, is_antiderivative, is_expanded, uses_numbers

Entry = dict[str, Any]
Verifier = Callable[[str, Entry], bool]

_PROBABILITY = re.compile(r"\d{1,400}/\d{1,400}|(?:\d{1,9}|\d{0,9}\.\d{1,20})(?:[eE]-\d{1,3})?", re.ASCII)
_MOVES = re.compile(r"[A-Z][+-][1-4](?:\s+[A-Z][+-][1-4])*", re.ASCII)
_BOX_MOVE = re.compile(r"move\(box_\w+, (?:target_\w+|square\[[\d.]+, [\d.]+\])\)", re.ASCII)
_LOGIC = re.compile(r"[A-Z()\s↔→∨∧¬]*")
# Python's operators of the same precedence.
_AS_PYTHON = str.maketrans("↔→∨∧¬", "|^&+~")


def _coin_flip(answer: str, entry: Entry) -> bool:
    text, rational = answer.strip(), entry["metadata"]["rational"]
    if not _PROBABILITY.fullmatch(text):
        return False
    wanted = Fraction(rational["numerator"], rational["denominator"])
    return abs(Fraction(text) - wanted) <= min(Fraction(1, 10_000), wanted / 100)


def _number_sorting(answer: str, entry: Entry) -> bool:
    numbers = json.loads(answer.replace("'", '"'))
    wanted = [Decimal(number) for number in entry["metadata"]["sorted_numbers"]]
    return isinstance(numbers, list) and [Decimal(str(number)) for number in numbers] == wanted


def _pool_matrix(answer: str, entry: Entry) -> bool:
    rows = [[float(cell) for cell in row.split()] for row in answer.strip().splitlines()]
    wanted = entry["metadata"]["solution"]
    return [len(row) for row in rows] == [len(row) for row in wanted] and all(
        abs(x - y) <= 0.0051 for row, other in zip(rows, wanted, strict=True) for x, y in zip(row, other, strict=True)
    )


def _decimal_arithmetic(answer: str, entry: Entry) -> bool:
    # Reasoning-gym rounds every intermediate result to the digits that are asked for; three of them may be lost, but
    # three have to be right.
    asked = re.search(r"maximum of (\d+) significant digits", entry["question"])
    with localcontext(prec=50):  # reasoning-gym sets the process's precision
        wanted, tolerance = Decimal(entry["answer"]), Decimal(10) ** min(-3, 3 - int(asked[1] if asked else 12))
        return abs(Decimal(answer.strip()) - wanted) <= abs(wanted) * tolerance


def _calendar_arithmetic(answer: str, entry: Entry) -> bool:
    text, wanted = answer.strip(), entry["answer"]
    return text.lower() == wanted.lower() or (wanted.lstrip("-").isdigit() and int(text) == int(wanted))


def _rush_hour(answer: str, entry: Entry) -> bool:
    from reasoning_gym.games.rush_hour import Board

    if not _MOVES.fullmatch(answer.strip()):
        return False
    board = Board(entry["metadata"]["board_config"])
    for move in answer.split():
        for _ in range(int(move[2])):
            before = str(board)
            board.move(move[0], 1 if move[1] == "+" else -1)
            if str(board) == before:
                return False
    return bool(board.solved)


def _boxnet(answer: str, entry: Entry) -> bool:
    from reasoning_gym.games.boxnet import action_from_response

    plan = json.loads(answer)
    if not all(_BOX_MOVE.fullmatch(action) for step in plan for action in step.values()):
        return False
    left = action_from_response(entry["metadata"]["initial_state"], plan)
    return not any(item.startswith("box_") for items in left.values() for item in items)


def _propositional_logic(answer: str, entry: Entry) -> bool:
    """Whether a formula follows from the premises, and is neither a single name nor always true."""
    names = entry["metadata"]["variables"]
    if len(answer) > MAX_CHARACTERS or not _LOGIC.fullmatch(answer):
        return False
    # The truth of a formula in every row of the truth table, as the bits of an integer.
    rows = 1 << len(names)
    truth = {name: sum(1 << row for row in range(rows) if row >> i & 1) for i, name in enumerate(names)}
    always = (1 << rows) - 1

    def of(node: ast.expr) -> int:
        match node:
            case ast.Name(id=name):
                return truth[name]
            case ast.UnaryOp(op=ast.Invert(), operand=x):
                return always ^ of(x)
            case ast.BinOp(left=x, op=ast.Add(), right=y):
                return of(x) & of(y)
            case ast.BinOp(left=x, op=ast.BitAnd(), right=y):
                return of(x) | of(y)
            case ast.BinOp(left=x, op=ast.BitXor(), right=y):
                return (always ^ of(x)) | of(y)
            case ast.BinOp(left=x, op=ast.BitOr(), right=y):
                return always ^ of(x) ^ of(y)
        raise ValueError("no formula")

    def parsed(text: str) -> ast.expr:
        return ast.parse(" ".join(text.translate(_AS_PYTHON).split()), mode="eval").body

    formula, given = parsed(answer), always
    for premise in entry["metadata"]["premises"]:
        given &= of(parsed(premise))
    conclusion = of(formula)
    return not isinstance(formula, ast.Name) and conclusion != always and not given & ~conclusion


def _antiderivative(answer: str, entry: Entry) -> bool:
    return is_antiderivative(answer, entry["metadata"]["integrand"], entry["metadata"]["variable"])


def _time_intervals(answer: str, entry: Entry) -> bool:
    text, metadata = answer.strip(), entry["metadata"]
    if text == entry["answer"].strip():
        return True
    # Reasoning-gym cuts its milliseconds off a float, so that they are often one too low.
    start, end = (datetime.fromisoformat(metadata[key]) for key in ("start_time", "end_time"))
    ms = (end - start) // timedelta(milliseconds=1)
    exact = f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}"
    return metadata["expected_format"] == "HH:MM:SS.mmm" and text == exact


def _same_json(answer: str, entry: Entry) -> bool:
    found, wanted = (json.dumps(json.loads(text), sort_keys=True) for text in (answer, entry["answer"]))
    return found == wanted


def _to_the_letter(answer: str, entry: Entry) -> bool:
    return bool(answer == entry["answer"])


def _exactly(answer: str, entry: Entry) -> bool:
    return answer.strip() == entry["answer"].strip()


#: The verifiers that replace reasoning-gym's, by data set: whether an answer is right for an entry. They may raise any
#: error for a wrong answer.
VERIFIERS: dict[str, Verifier] = {
    # Evaluated as Python, for a part of the score.
    "binary_matrix": _to_the_letter,
    "n_queens": lambda answer, entry: answer in entry["metadata"]["valid_answers"],
    "spiral_matrix": _exactly,
    "string_insertion": _to_the_letter,
    # Evaluated as Python by sympy.
    "countdown": lambda answer, entry: uses_numbers(answer, entry["metadata"]["numbers"], entry["metadata"]["target"]),
    "intermediate_integration": _antiderivative,
    "polynomial_multiplication": lambda answer, entry: is_expanded(answer, entry["answer"]),
    "puzzle24": lambda answer, entry: uses_numbers(answer, entry["metadata"]["numbers"], 24),  # rounded 24.9 down
    "simple_integration": _antiderivative,
    # Could take minutes or gigabytes.
    "codeio": _same_json,
    "propositional_logic": _propositional_logic,
    "rush_hour": _rush_hour,  # and illegal moves were skipped
    # Paid for texts that ignore the question, such as any text, `0`, or a list of NaN.
    "coin_flip": _coin_flip,
    "game_of_life_halting": _exactly,
    "number_sorting": _number_sorting,
    "boxnet": _boxnet,  # targets could be moved to the boxes
    # Paid with a part missing, with more text, or with a wide tolerance.
    "calendar_arithmetic": _calendar_arithmetic,
    "decimal_arithmetic": _decimal_arithmetic,
    "figlet_font": lambda answer, entry: answer.replace(" ", "").strip().lower() == entry["answer"].lower(),
    "game_of_life": _same_json,
    "gsm_symbolic": lambda answer, entry: Decimal(answer.strip().replace(",", "")) == Decimal(entry["answer"]),
    "letter_jumble": lambda answer, entry: answer.lower().split() == entry["answer"].lower().split(),
    "number_format": lambda answer, entry: abs(float(answer.replace(",", "")) - entry["metadata"]["solution"]) < 5e-4,
    "pool_matrix": _pool_matrix,
    "spell_backward": lambda answer, entry: answer.strip().lower() == entry["answer"].lower(),
    "time_intervals": _time_intervals,  # and refused right milliseconds
    "word_sorting": lambda answer, entry: (
        [word.strip() for word in answer.split(",")] == entry["metadata"]["sorted_words"]
    ),
}

_NUMBER = r"-?\d+(?:\.\d+)?"
_TURN = r"(?:[LRDUBF]w?|[XYZMES])'?\d?"
_POUR = r'"(?:(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z])"'

# Possessive quantifiers (`*+`), since two neighbours that match the same spaces would take quadratic time.

#: What an answer must match before reasoning-gym's own verifier reads it, by data set.
FORMS: dict[str, re.Pattern[str]] = {
    "advanced_geometry": re.compile(
        rf"\s*+\(?\s*{_NUMBER}\s*,\s*{_NUMBER}\s*+\)?\s*|\s*{_NUMBER}\s*+°?\s*", re.ASCII
    ),  # a third coordinate was ignored
    "bitwise_arithmetic": re.compile(r"\s*-?0x[0-9a-f]+\s*", re.ASCII | re.IGNORECASE),
    "complex_arithmetic": re.compile(r"[\d.+\-ijIJ() ]*", re.ASCII),  # `nan` was paid
    "fraction_simplification": re.compile(
        r"\s*+\$?\s*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d+\s*/\s*\d+)\s*+\$?\s*", re.ASCII
    ),
    "jugs": re.compile(rf"\s*\[\s*{_POUR}(?:\s*,\s*{_POUR})*\s*\]\s*", re.ASCII),
    "kakurasu": re.compile(r"[01\s]*"),
    "knights_knaves": re.compile(r"\s*\w+ is an? \w+[,.]?(?:\s+(?:and\s+)?\w+ is an? \w+[,.]?)*\s*", re.IGNORECASE),
    "polynomial_equations": re.compile(rf'\s*(?:{_NUMBER}(?:\s*,\s*{_NUMBER})*|"")?\s*', re.ASCII),
    "quantum_lock": re.compile(r"\s*[ABC](?:(?:\s*(?:→|->|,))?\s*[ABC])*\s*", re.IGNORECASE),
    "rubiks_cube": re.compile(rf"\s*(?:{_TURN}\s++)*(?:{_TURN})?\s*", re.ASCII),  # `R99999999` took gigabytes
    "sokoban": re.compile(r"[LRUD\s]*"),
    "survo": re.compile(r"[\d\s]*", re.ASCII),
}
