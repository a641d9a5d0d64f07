import re
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import create_dataset

from troll.tasks.formulas import VERIFIERS, is_antiderivative, is_expanded, uses_numbers
from troll.tasks.reasoning_gym import Question, is_correct


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_verifiers_accept_the_answers_of_the_data_set_and_no_others(name: str) -> None:
    entries = create_dataset(name, seed=3, size=40)
    for entry in entries:
        answer = entry["metadata"]["valid_answers"][0] if name == "n_queens" else entry["answer"]
        if "Integral(" in answer:  # sympy did not find the integral, and the data set's verifier accepts the question
            assert not is_correct(entries, answer, Question("", entry))
            continue
        assert entries.score_answer(answer, entry) == 1
        assert is_correct(entries, answer, Question("", entry))
        for wrong in ("", "0", f"{answer} + {answer}", answer[1:], f"[{answer}]", f"{answer} # {answer}"):
            assert not is_correct(entries, wrong, Question("", entry)), wrong


def test_verifiers_replace_all_that_evaluate_the_models_text() -> None:
    evaluated = re.compile(r"\b(?:eval|parse_expr|sympify|exec)\(answer")
    found = {
        path.stem
        for path in Path(reasoning_gym.__file__).parent.rglob("*.py")
        if evaluated.search(path.read_text(encoding="utf-8"))
    }
    assert found == VERIFIERS.keys()


@pytest.mark.parametrize(
    "answer",
    [
        "exit()", "__import__('os').abort()", "open('a', 'w')", "9**9**9**9", "60**75**8", "99999999!",
        "x" * 9999, "(" * 80 + "9" + "**99)" * 80,
        "(" * 900 + "1" + ")" * 900, "-" * 999 + "1", "exp(" * 300 + "9" + ")" * 300, "1/0", "0**-1", "x.real",
        "[1][0]",
        "lambda: 1", "1if 1else 1", "True", "1j", "", "x\n", "f(x)", "exp(x, x)", "exp(x=1)", "2(3)", "٣", "1 # 2",
        "'24'",
        "log(0)", "exp(999)", "x**(10**9)", "0.1**1000000", "E**(E**(E**9))", "7" * 999,
    ],
)  # fmt: skip
def test_verifiers_run_nothing_and_end(answer: str) -> None:
    questions: list[tuple[str, dict[str, object]]] = [
        ("puzzle24", {"numbers": [4, 6, 1, 1]}),
        ("simple_integration", {"integrand": "2*x", "variable": "x"}),
        ("polynomial_multiplication", {}),
        ("string_insertion", {}),
    ]
    for name, metadata in questions:
        entry = {"answer": "x**2 - 1", "metadata": {"source_dataset": name, **metadata}}
        assert not is_correct(create_dataset(name, size=1), answer, Question("", entry))


def test_uses_numbers_is_exact_and_takes_each_number_once() -> None:
    assert uses_numbers(" (8 / 3 - 8/3 + 1)*24", [8, 3, 8, 3, 1, 24], 24)
    assert uses_numbers("8/(3 - 8/3)", [3, 3, 8, 8], 24)
    assert not uses_numbers("8/(3 - 8/3)", [3, 8, 8, 8], 24)
    assert not uses_numbers("4*6 + 1/2", [4, 6, 1, 2], 24)  # reasoning-gym rounds it down
    assert not uses_numbers("1000*1000/1000", [1000, 1000, 1000], 999)
    for other in ("4*6*1.0", "4*6**1", "4*6//1", "4*6%7"):
        with pytest.raises(ValueError, match=r"no formula|no integer"):
            uses_numbers(other, [4, 6, 1], 24)


def test_is_expanded_compares_polynomials() -> None:
    assert is_expanded("2*x*y - -3*x**2*y/6 + (1 + 1)*(x - 1)", "x**2*y/2 + 2*x*y + 2*x - 2")
    assert is_expanded("x - x", "0")
    assert not is_expanded("x**2*y", "x*y**2")
    assert not is_expanded("x**2", "X**2")
    for unexpanded in ("(x + 1)*(x - 1)", "x*(x + 1)", "(x + 1)**2", "1/x", "x**y", "x**-1"):
        with pytest.raises(ValueError, match=r"not expanded|division by"):
            is_expanded(unexpanded, "x**2 - 1")


@pytest.mark.parametrize(
    ("answer", "integrand", "right"),
    [
        ("x**3/3 + C", "x**2", True),
        ("x**3/3 + K - 7*pi", "x**2", True),
        ("0.333333*x**3", "x**2", False),
        ("x**3/3 + K*x", "x**2", False),
        ("x**3/3 + C", "X**2", False),
        ("log(x)**2/2", "log(x)/x", True),
        ("ln(2*x)", "1/x", True),
        ("E**(2*x)/2", "exp(2*x)", True),
        ("2**x/ln(2)", "2**x", True),
        ("x**x", "x**x*(log(x) + 1)", True),
        ("-2*(1 - x)**(3/2)/3", "sqrt(1 - x)", True),
        ("x*asin(3*x) + sqrt(1 - 9*x**2)/3", "asin(3*x)", True),
        ("x*acos(x) - sqrt(1 - x**2)", "acos(x)", True),
        ("x*atan(x) - log(1 + x**2)/2", "atan(x)", True),
        ("-log(cos(x))", "tan(x)", True),
        ("tan(x)", "1/cos(x)**2", True),
        ("exp(x)*(sin(x) - cos(x))/2", "exp(x)*sin(x)", True),
        ("exp(x)*(sin(x) + cos(x))/2", "exp(x)*sin(x)", False),
    ],
)
def test_is_antiderivative(answer: str, integrand: str, right: bool) -> None:
    assert is_antiderivative(answer, integrand, "x") == right
