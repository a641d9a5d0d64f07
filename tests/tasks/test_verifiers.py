import json
import re
import time
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import create_dataset
from reasoning_gym.games.rush_hour import Board

from troll.tasks.reasoning_gym import Question, is_correct
from troll.tasks.verifiers import FORMS, VERIFIERS

SOLVED_BY_MANY = ("boxnet", "rush_hour")  # without an answer of the data set


def is_right(name: str, answer: str, metadata: dict[str, Any] | None = None, own: str = "") -> bool:
    """Whether an answer is right for a made-up entry with this metadata and the data set's own answer."""
    entry = {"question": "", "answer": own, "metadata": {"source_dataset": name, **(metadata or {})}}
    return is_correct(create_dataset(name, size=1), answer, Question("", entry))


@pytest.mark.parametrize("name", sorted({*VERIFIERS, *FORMS}.difference(SOLVED_BY_MANY)))
def test_verifiers_accept_the_answers_of_the_data_set(name: str) -> None:
    entries = create_dataset(name, seed=3, size=20)
    for entry in entries:
        examples = [entry["metadata"].get(f"example_{kind}") for kind in ("answer", "correct_answer")]
        answer = next(filter(None, [entry["answer"], *examples]))
        assert entries.score_answer(answer, entry) == 1
        # Where sympy did not find the integral, the data set's answer is the question.
        assert is_correct(entries, answer, Question("", entry)) == ("Integral(" not in answer)
        assert not is_correct(entries, f"{answer} or {answer}", Question("", entry))
        if name in VERIFIERS:
            for wrong in ("", "x", "nan", f"{answer} # {answer}", f"{answer}, and more"):
                assert not is_correct(entries, wrong, Question("", entry)), wrong


def test_verifiers_replace_all_that_evaluate_the_models_text() -> None:
    evaluated = re.compile(r"\b(?:eval|parse_expr|sympify|exec)\(answer")
    found = {
        path.stem
        for path in Path(reasoning_gym.__file__).parent.rglob("*.py")
        if evaluated.search(path.read_text(encoding="utf-8"))
    }
    assert len(found) == 9
    assert found <= VERIFIERS.keys()


@pytest.mark.parametrize(
    "answer",
    [
        "exit()", "__import__('os').abort()", "open('a', 'w')", "9**9**9**9", "60**75**8", "99999999!",
        "x" * 9999, "(" * 80 + "9" + "**99)" * 80,
        "(" * 900 + "1" + ")" * 900, "-" * 999 + "1", "exp(" * 300 + "9" + ")" * 300, "1/0", "0**-1", "x.real",
        "[1][0]",
        "lambda: 1", "1if 1else 1", "True", "1j", "", "x\n", "f(x)", "exp(x, x)", "exp(x=1)", "2(3)", "٣", "1 # 2",
        "'24'",
        "log(0)", "exp(999)", f"({'+'.join(ascii_lowercase)}){'/(7**99)**35*(9**99)**31' * 30}",
        "x**(10**9)", "0.1**1000000", "E**(E**(E**9))", "7" * 999,
    ],
)  # fmt: skip
def test_verifiers_run_nothing_and_end(answer: str) -> None:
    begin = time.process_time()
    questions: list[tuple[str, dict[str, object]]] = [
        ("puzzle24", {"numbers": [4, 6, 1, 1]}),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}),
        ("polynomial_multiplication", {}),
        ("string_insertion", {}),
    ]
    for name, metadata in questions:
        entry = {"answer": "x**2 - 1", "metadata": {"source_dataset": name, **metadata}}
        assert not is_correct(create_dataset(name, size=1), answer, Question("", entry))
    assert time.process_time() - begin < 5  # without limits, some take hours


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("advanced_geometry", "{},0"),
        ("bitwise_arithmetic", "375187"),
        ("boxnet", "[]"),
        ("calendar_arithmetic", "{}0"),
        ("coin_flip", "0"),
        ("coin_flip", "1e999999999"),
        ("complex_arithmetic", "nan"),
        ("decimal_arithmetic", "{}9e9"),
        ("figlet_font", "{}?"),
        ("fraction_simplification", "{} or 1/2"),
        ("game_of_life", "{}0"),
        ("game_of_life_halting", "the question"),
        ("gsm_symbolic", "-{}"),
        ("gsm_symbolic", "{} or 3"),
        ("jugs", "{} quickly"),
        ("kakurasu", "{} and more"),
        ("kakurasu", "{} 7"),
        ("knights_knaves", "It is false that {}"),
        ("letter_jumble", "{} and more"),
        ("number_format", "nan"),
        ("number_sorting", '["nan", "nan", "nan"]'),
        ("polynomial_equations", "maybe, {}"),
        ("pool_matrix", "{} # more"),
        (
            "propositional_logic",
            "a ∧ b ∧ c ∧ d ∧ e ∧ f ∧ g ∧ h ∧ i ∧ j ∧ k ∧ l ∧ m ∧ n ∧ o ∧ p ∧ q ∧ r ∧ s ∧ t ∧ u ∧ v",
        ),
        ("quantum_lock", "But But But"),
        ("rubiks_cube", "R9999999999"),
        ("rush_hour", "A+999999999999"),
        ("sokoban", "{} x"),
        ("spell_backward", "{} or more"),
        ("survo", "{} x"),
        ("time_intervals", "{}:junk"),
        ("word_sorting", "{}, and, more"),
    ],
)
def test_verifiers_pay_for_nothing_else(name: str, template: str) -> None:
    entries = create_dataset(name, seed=3, size=10)
    for entry in entries:
        assert not is_correct(entries, template.format(entry["answer"]), Question("", entry))


def test_number_sorting_and_pool_matrix_are_exact() -> None:
    numbers = {"sorted_numbers": ["-1.25", "3.5"]}
    assert is_right("number_sorting", '["-1.25", 3.50]', numbers)
    assert not is_right("number_sorting", "[-1, 3]", numbers)
    assert is_right("pool_matrix", "1.5 2\n3 4.0", {"solution": [[1.5, 2.0], [3.0, 4.0]]})
    assert not is_right("pool_matrix", "1.5 2 3 4", {"solution": [[1.5, 2.0], [3.0, 4.0]]})
    assert not is_right("pool_matrix", "1.51 2\n3 4", {"solution": [[1.5, 2.0], [3.0, 4.0]]})


def test_coin_flip_takes_a_fraction_or_a_rounded_number() -> None:
    third = {"rational": {"numerator": 1, "denominator": 3}}
    tiny = {"rational": {"numerator": 1, "denominator": 10**106}}
    assert is_right("coin_flip", f"1/{10**106}", tiny) and is_right("coin_flip", "1.0e-106", tiny)
    assert all(is_right("coin_flip", text, third) for text in ("1/3", "2/6", "0.3333", ".33333"))
    assert not any(is_right("coin_flip", text, third) for text in ("0.33", "1/0", "0", "0.3333 or 1", "1"))


def test_calendar_and_decimal_arithmetic_compare_numbers() -> None:
    assert is_right("calendar_arithmetic", "07", own="7") and is_right("calendar_arithmetic", "monday", own="Monday")
    assert not is_right("calendar_arithmetic", "7", own="-1")
    assert is_right("decimal_arithmetic", "0.125", own="0.1250000000001")
    assert not is_right("decimal_arithmetic", "0.12500001", own="0.125")
    for precision, wrong in ((2, "0"), (3, "3.48"), (4, "3.48"), (5, "3.46")):  # three digits have to be right
        asked = f"a maximum of {precision} significant digits"
        entry = {"question": asked, "answer": "3.45", "metadata": {"source_dataset": "decimal_arithmetic"}}
        for answer in ("3.45", wrong):
            question = Question("", entry)
            assert is_correct(create_dataset("decimal_arithmetic", size=1), answer, question) == (answer == "3.45")
    entry = create_dataset("decimal_arithmetic", size=1, precision=6)[0]
    right = Question("", entry | {"answer": "8.27243"})
    assert is_correct(create_dataset("decimal_arithmetic", size=1), "8.27244", right)
    assert not is_correct(create_dataset("decimal_arithmetic", size=1), "8.3", right)


def test_json_is_compared_with_its_types() -> None:
    assert is_right("codeio", '{"b": 1, "a": [true]}', own='{"a": [true], "b": 1}')
    assert not is_right("codeio", "1", own="true")
    assert is_right("game_of_life", "[[1,0]]", own="[[1, 0]]")
    assert not is_right("game_of_life", "[[true, 0]]", own="[[1, 0]]")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("P ∧ Q", True),
        ("Q ∨ R", True),
        ("¬(¬Q ∧ R)", True),
        ("R → Q", True),
        ("P ↔ Q", True),
        ("Q ∧ R", False),
        ("¬P ∨ R", False),
        ("Q", False),  # a single name, as reasoning-gym has it
        ("Q ∨ ¬Q", False),
        ("PP ∨ Q", False),
        ("", False),
    ],
)
def test_propositional_logic_takes_what_follows(answer: str, right: bool) -> None:
    premises = {"variables": ["P", "Q", "R"], "premises": ["P", "P → Q"]}
    assert is_right("propositional_logic", answer, premises) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("12:27:12.869", True),
        (" 12:27:12.868 ", True),  # reasoning-gym's own
        ("12:27:12.867", False),
        ("12:27:12", False),
        ("12:27:12.8690", False),
    ],
)
def test_time_intervals_takes_exact_milliseconds(answer: str, right: bool) -> None:
    times = {"start_time": "2026-11-26 09:43:58.821000", "end_time": "2026-11-26 22:11:11.690000"}
    assert is_right("time_intervals", answer, times | {"expected_format": "HH:MM:SS.mmm"}, own="12:27:12.868") == right


def test_time_intervals_takes_no_milliseconds_where_none_are_asked_for() -> None:
    times = {"start_time": "2026-11-26 09:43:00", "end_time": "2026-11-26 22:11:00", "expected_format": "HH:MM"}
    assert is_right("time_intervals", "12:28", times, own="12:28")
    assert not is_right("time_intervals", "12:28:00.000", times, own="12:28")


def test_boxnet_moves_boxes_only() -> None:
    state = {"initial_state": {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"]}}
    to_target = {"Agent[0.5, 1.5]": "move(box_red, target_red)"}
    plan = [{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"}, to_target]
    assert is_right("boxnet", json.dumps(plan), state)
    assert not is_right("boxnet", json.dumps(plan[:1]), state)
    moved = {"Agent[0.5, 1.5]": "move(target_red, square[0.5, 0.5])"}
    assert not is_right("boxnet", json.dumps([moved, {"Agent[0.5, 0.5]": "move(box_red, target_red)"}]), state)


def test_rush_hour_takes_legal_moves_only() -> None:
    entry = create_dataset("rush_hour", seed=3, size=1, min_moves=3, max_moves=8)[0]
    start, seen = entry["metadata"]["board_config"], set()
    cars = sorted(set(str(Board(start))) - set(".x"))  # as the question names them
    queue: list[list[str]] = [[]]
    while True:  # breadth first
        path = queue.pop(0)
        board = Board(start)
        for move in path:
            board.move(move[0], 1 if move[1] == "+" else -1)
        if board.solved:
            break
        if str(board) not in seen:
            seen.add(str(board))
            queue += [[*path, f"{car}{sign}1"] for car in cars for sign in "+-"]
    assert is_right("rush_hour", " ".join(path), {"board_config": start})
    assert not is_right("rush_hour", " ".join(path[:-1]), {"board_config": start})
    board = Board(start)
    blocked = next(f"{car}{sign}1" for car in cars for sign in "+-" if not moved_by(start, car, sign))
    assert not is_right("rush_hour", " ".join([blocked, *path]), {"board_config": start})


def moved_by(start: str, car: str, sign: str) -> bool:
    board = Board(start)
    board.move(car, 1 if sign == "+" else -1)
    return str(board) != str(Board(start))


def test_long_polynomials_are_read() -> None:
    entries = create_dataset(
        "polynomial_multiplication", size=6, seed=1, min_terms=8, max_terms=16, max_value=10**8, max_degree=40
    )
    assert max(len(entry["answer"]) for entry in entries) > 1000
    for entry in entries:
        assert is_correct(entries, entry["answer"], Question("", entry))
