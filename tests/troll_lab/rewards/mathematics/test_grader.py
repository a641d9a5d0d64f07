import copy
import datetime
import decimal
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import pytest

from tests.troll_lab.rewards.datasets import DATA, rows
from troll.grading import Verdict
from troll_lab.rewards.answers import final_answer
from troll_lab.rewards.mathematics import MathGrader, compute_score, success
from troll_lab.rewards.mathematics.pool import Comparison, ask

MARKED = {"boxed": r"\boxed{%s}", "hash": "#### %s", "tag": "<answer>%s</answer>"}


def _verdict(text, gold="18", **settings):
    return MathGrader(**settings).grade([text], answer=[gold])[0]


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        (r"\boxed{18.0}", "18.0", "correct"),
        (r"\boxed{\frac{36}{2}}", r"\frac{36}{2}", "correct"),
        (r"\boxed{19}", "19", "wrong answer"),
        (r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}", "time limit"),
        ("18", None, "no answer"),
        ("#### 18", None, "no answer"),
        ("<answer>18</answer>", None, "no answer"),
        (r"\boxed{}", None, "no answer"),
        (r"\boxed{18} \boxed{}", None, "no answer"),
        (r"It is 18. \boxed{20}", "20", "wrong answer"),
        (r"\boxed{18} no, \boxed{20}", "20", "wrong answer"),
        (r"\boxed{17, 18}", "17, 18", "wrong answer"),
        (r"\boxed{18}, so \boxed{17 \text{ or } 18}", r"17 \text{ or } 18", "wrong answer"),
        (r"\boxed{\boxed{17} 18}", r"\boxed{17} 18", "wrong answer"),
        (r"\boxed{\boxed{18} 17}", r"\boxed{18} 17", "wrong answer"),
        (r"20 The final answer is $18$. I hope it is correct. \boxed{20}", "20", "wrong answer"),
        (r"\boxed{20. The final answer is $18$. I hope}", "20. The final answer is $18$. I hope", "wrong answer"),
    ],
)
def test_grade_judges_only_final_answer(text, answer, reason):
    verdict = _verdict(text, cpu_seconds=0.3 if reason == "time limit" else 2.0)
    assert verdict == Verdict(float(reason == "correct"), answer, reason)


@pytest.mark.parametrize("trouble", [Comparison.KILLED, Comparison.SILENT, Comparison.NOT_STARTED])
def test_grade_leaves_answers_unscored_when_the_machine_fails(monkeypatch, trouble):
    monkeypatch.setattr("troll_lab.rewards.mathematics.grader.ask", lambda questions, *how: [trouble] * len(questions))
    texts = [r"\boxed{\frac{36}{2}}", r"\boxed{18}", r"\boxed{19}", "18"]
    verdicts = MathGrader().grade(texts, answer=["18"] * 4)
    assert verdicts[0] == Verdict(None, r"\frac{36}{2}", trouble.value)
    assert verdicts[0].reason.startswith("unscored: ")
    assert MathGrader()([], texts, answer=["18"] * 4) == [None, 1.0, 0.0, 0.0]  # the others do not need it
    assert not MathGrader().same_answer(r"\frac{36}{2}", "18")
    with pytest.raises(RuntimeError, match="a completion is unscored: the process of math-verify"):
        compute_score("gsm8k", texts[0], "18")


def test_success_takes_texts_and_conversations():
    completions: list[Any] = [r"\boxed{18}", r"\boxed{20}"]
    completions.append([{"role": "assistant", "content": r"\boxed{\frac{54}{3}}"}])
    assert success(prompts=["?"] * 3, completions=completions, answer=["18"] * 3, trainer_state=None) == [1.0, 0.0, 1.0]
    assert success.__name__ == "success"
    assert success([], [], answer=[]) == []


def test_same_answer_takes_either_as_gold():
    grader = MathGrader()
    assert grader.votes
    assert grader.same_answer(r"\frac12", "0.5")
    assert grader.same_answer("5", "x = 5") and grader.same_answer("x = 5", "5")
    assert not grader.same_answer("0.5", "0.6")


@pytest.mark.parametrize("gold", [27, 27.0, 0.5, 2**70, decimal.Decimal("12345678901234567890.5")])
def test_golds_may_be_numbers(gold):
    assert _verdict(rf"\boxed{{{gold}}}", gold).score == 1


@pytest.mark.parametrize(
    "gold",
    [12345678901234567890.0, -(2.0**53), float("nan"), float("inf"), True, datetime.date(2024, 5, 1), [18], b"18"],
)
def test_golds_that_were_rounded_or_changed_are_refused(gold):
    with pytest.raises(ValueError, match=r"answer'.* got .*: write the answers of this column as text"):
        success.grade(["18", "18"], answer=["18", gold])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: success.grade(["18"]), "column 'answer', which the data set lacks"),
        (lambda: success.grade(["18", "18"], answer=["18"]), "got 2 completions, and the column 'answer'"),
        (lambda: success.grade(["18", "18"], answer=["18", None]), "got 2 completions, and the column 'answer'"),
        (lambda: MathGrader("xml"), "answer_format must be one of boxed, hash, tag, got 'xml'"),  # type: ignore[arg-type]
        (lambda: MathGrader(cpu_seconds=1e-9), "cpu_seconds must be from 0.01 to 3600"),
        (lambda: MathGrader(cpu_seconds=float("nan")), "cpu_seconds must be from 0.01 to 3600"),
        (lambda: MathGrader(cpu_seconds=float("inf")), "cpu_seconds must be from 0.01 to 3600"),
    ],
)
def test_math_grader_refuses_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_grade_without_math_verify_names_the_package(monkeypatch):
    monkeypatch.setattr("troll_lab.rewards.mathematics.grader.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "troll-rl\[tasks\]"'):
        success.grade([r"\boxed{18}"], answer=["18"])


def test_math_grader_can_be_copied_and_pickled():
    _verdict(r"\boxed{\frac{36}{2}}")  # its processes run
    for copied in (copy.deepcopy(success), pickle.loads(pickle.dumps(MathGrader("boxed")))):
        assert copied([], [r"\boxed{\frac{36}{2}}"], answer=["18"]) == [1.0]


def test_compute_score_has_the_signature_of_verl():
    assert compute_score("gsm8k", r"\boxed{\frac{36}{2}}", "18") == {"score": 1.0, "acc": True, "pred": r"\frac{36}{2}"}
    assert compute_score("gsm8k", "18", "18", extra_info={}) == {"score": 0.0, "acc": False, "pred": ""}
    assert compute_score("gsm8k", "#### 18", "18", None, answer_format="hash", sandbox_fusion_url=None)["score"] == 1.0
    hostile = compute_score("gsm8k", "\\boxed{\x1b[31m\ud800}", "18")["pred"]
    assert hostile.isprintable()
    assert hostile.encode("utf-8")
    with ThreadPoolExecutor(8) as threads:
        scores = threads.map(lambda i: compute_score("d", rf"\boxed{{\frac{{{i}}}{{2}}}}", "9")["score"], range(64))
    assert list(scores) == [float(i == 18) for i in range(64)]


# The real problems, and ways to write and to spoil their gold answers.

FILES = {
    "gsm8k-train": (DATA / "gsm8k" / "train.jsonl", 7473),
    "gsm8k-test": (DATA / "gsm8k" / "test.jsonl", 1319),
    "aime24": (DATA / "math_eval" / "aime24.jsonl", 30),
    "amc23": (DATA / "math_eval" / "amc23.jsonl", 40),
    "minerva_math": (DATA / "math_eval" / "minerva_math.jsonl", 272),
}

#: Looks and signs that change no answer, around any answer, and around a number.
LOOKS = (r"\boldsymbol{%s}", r"{\color{red}%s}", r"\large %s", r"\(%s\)", "{%s}")
AROUND_NUMBERS = (
    "x = %s",
    r"%s \text{ units}",
    r"%s\,\mathrm{cm}^2",
    r"\$%s",
    r"%s^\circ",
    "%s dollars",
    "%s.",
    "$ %s $",
)
#: What makes a number wrong.
SPOILED = (
    "%s, 1234567", r"%s \text{ or } 1234567", r"1234567 \text{, not } %s", r"%s \text{ or 1234567}", "1234567 = %s",
    r"%s \approx 1234567", "x > %s",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A solution without its final answer, and that answer."""

    solution: str
    gold: str

    def solved(self, answer_format, answer=None):
        """The whole solution, ending in an answer, its gold one by default."""
        return self.solution + "\n" + MARKED[answer_format] % (self.gold if answer is None else answer)


@lru_cache
def _problems(name):
    return [_problem(name, row) for row in rows(FILES[name][0])]


def _problem(name, row):
    if name.startswith("gsm8k"):
        solution, _, gold = row["answer"].rpartition("####")
        return Problem(solution, gold.strip())
    if name == "minerva_math":
        return Problem(row["solution"], final_answer(row["solution"]) or "")
    return Problem(row.get("solution", row["problem"]), str(row["answer"]))


@pytest.fixture(params=FILES)
def name(request):
    return request.param


@pytest.fixture(params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def problems(request, name):
    found = _problems(name)
    return found if request.param == "all" else found[:: max(1, len(found) // 12)]


@pytest.fixture(params=MARKED)
def grader(request):
    return MathGrader(request.param)


def _accepted(grader, cases):
    """The cases, each a completion and a gold answer, that score 1."""
    verdicts = grader.grade([text for text, _ in cases], answer=[gold for _, gold in cases])
    return [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.success]


def test_real_golds_score_1_in_their_solutions(name, grader):
    found = _problems(name)
    assert len(found) == FILES[name][1]
    cases = [(problem.solved(grader.answer_format), problem.gold) for problem in found]
    if name == "minerva_math" and grader.answer_format == "boxed":
        cases += [(problem.solution, problem.gold) for problem in found]
    assert _accepted(grader, cases) == cases


def test_math_verify_agrees_with_real_golds(problems):
    # Asked directly: `compare` takes equal texts for equal answers without it.
    golds = sorted({problem.gold for problem in problems})
    assert ask([(gold, gold) for gold in golds], 5.0) == [Comparison.EQUAL] * len(golds)


def _number(gold):
    text = gold.replace(",", "")
    return Fraction(text) if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", text) else None


def _rewritten(gold):
    """The same answer in other words and looks."""
    text, value = gold.lstrip("+").replace(",", ""), _number(gold)
    yield from (look % gold.replace("np.arcsin", r"\arcsin") for look in LOOKS)
    if value is None:
        return
    yield from (form % text for form in AROUND_NUMBERS)
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        yield rf"{mantissa} \times 10^{{{int(exponent)}}}"
    elif "." in text:
        yield from (f"{text}0", rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    else:
        yield from (f"{text}.00", rf"\dfrac{{{2 * int(text)}}}{{2}}", f"{int(text) - 1} + 1", f"{int(text):,}")
        yield from (f"x = {int(text):,}", rf"{int(text):,} \text{{ units}}", f"${int(text):,} dollars$")


def _spoiled(gold):
    """Wrong answers that something was done to."""
    value = _number(gold)
    if value is None:
        yield from (f"({gold}) + 1", f"-({gold})", f"{gold}, 1234567")
        return
    mantissa, exponent = re.fullmatch(r"([^eE]*)(.*)", gold).groups()  # type: ignore[union-attr]
    yield from (form % gold for form in SPOILED)
    yield from (_text(value + 1), _text(value - 1), _text(value - 1) + " 1")  # the last are neighbours
    yield mantissa + (".7" if mantissa == "0" else "7") + exponent
    if value:
        yield mantissa[1:] + exponent if value < 0 else f"-{gold.lstrip('+')}"
        yield from (_text(value * 10) + r" \text{ cm}", _text(value * 1000) + " m", _text(value / 10))
        dropped = mantissa.replace(",", "")[:-1].rstrip(".") + exponent
        if len(mantissa.strip("+-")) > 1 and Fraction(dropped) != value:
            yield dropped


def _text(value):
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.17g}" if abs(value) >= 1e-4 else f"{float(value):.15e}"


def test_real_golds_in_other_words_or_looks_score_1(problems):
    cases = [(each.solved("boxed", form), each.gold) for each in problems for form in _rewritten(each.gold)]
    assert len(cases) >= 5 * len(problems)
    assert _accepted(MathGrader(), cases) == cases


def test_spoiled_real_golds_score_0(problems):
    cases = [(each.solved("boxed", wrong), each.gold) for each in problems for wrong in _spoiled(each.gold)]
    assert len(cases) > 10 * len(problems)
    assert _accepted(MathGrader(), cases) == []


def test_real_golds_in_passing_score_0(problems, grader):
    cases = []
    for problem in problems:
        no = problem.solved(grader.answer_format, "1234567")
        cases += [(f"{problem.solution.replace('boxed', 'text')} It is {problem.gold}.", problem.gold)]
        cases += [(f"It is {MARKED[grader.answer_format] % problem.gold}.\nNo:\n{no}", problem.gold)]
        cases += [(f"It is {problem.gold}.\n{no}", problem.gold)]
    assert _accepted(grader, cases) == []
