import copy
import datetime
import decimal
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.troll_lab.rewards.mathematics.gold import FILES, MARKED, ROWS, number, problems, spoiled
from troll.grading import Verdict
from troll_lab.rewards.mathematics import MathGrader, compute_score, success
from troll_lab.rewards.mathematics.pool import Comparison, ask


@pytest.fixture(params=MARKED)
def grader(request):
    return MathGrader(request.param)


def _verdict(text, gold="18", **settings):
    return MathGrader(**settings).grade([text], answer=[gold])[0]


def test_verdicts():
    assert _verdict(r"\boxed{18.0}") == Verdict(1.0, "18.0", "correct")
    assert _verdict(r"\boxed{\frac{36}{2}}") == Verdict(1.0, r"\frac{36}{2}", "correct")
    assert _verdict(r"\boxed{19}") == Verdict(0.0, "19", "wrong answer")
    assert _verdict("18") == Verdict(0.0, None, "no answer")
    assert _verdict(r"\boxed{}") == Verdict(0.0, None, "no answer")
    assert _verdict(r"\boxed{9^{9^{9^9}}}", cpu_seconds=0.3) == Verdict(0.0, "9^{9^{9^9}}", "time limit")


@pytest.mark.parametrize("trouble", [Comparison.KILLED, Comparison.SILENT, Comparison.NOT_STARTED])
def test_grade_leaves_answers_unscored_when_the_machine_fails(monkeypatch, trouble):
    monkeypatch.setattr("troll_lab.rewards.mathematics.grader.ask", lambda questions, *how: [trouble] * len(questions))
    texts = [r"\boxed{\frac{36}{2}}", r"\boxed{18}", r"\boxed{19}", "18"]
    verdicts = MathGrader().grade(texts, answer=["18"] * 4)
    assert verdicts[0] == Verdict(None, r"\frac{36}{2}", trouble.value)
    assert verdicts[0].reason.startswith("unscored: ")
    assert [verdict.score for verdict in verdicts[1:]] == [1.0, 0.0, 0.0]  # for these it is not needed
    assert MathGrader()([], texts, answer=["18"] * 4) == [None, 1.0, 0.0, 0.0]
    assert not MathGrader().same_answer(r"\frac{36}{2}", "18")
    with pytest.raises(RuntimeError, match="a completion is unscored: the process of math-verify"):
        compute_score("gsm8k", texts[0], "18")


def test_trl_calls_it():
    completions = [r"\boxed{18}", r"\boxed{20}", [{"role": "assistant", "content": r"\boxed{\frac{54}{3}}"}]]
    rewards = success(prompts=["?"] * 3, completions=completions, answer=["18"] * 3, trainer_state=None)  # type: ignore[arg-type]
    assert rewards == [1.0, 0.0, 1.0]
    assert success.__name__ == "success"
    assert success([], [], answer=[]) == []


@pytest.mark.parametrize(
    "text",
    [
        r"It is 18. \boxed{20}",
        r"\boxed{18} no, \boxed{20}",
        r"\boxed{18} \boxed{}",
        r"\boxed{17, 18}",
        r"\boxed{17} or \boxed{18}, so \boxed{17 \text{ or } 18}",
        r"\boxed{\boxed{17} 18}",
        r"\boxed{\boxed{18} 17}",
        r"\boxed{18} 20 \boxed{20}",
        r"20 The final answer is $18$. I hope it is correct. \boxed{20}",
        r"\boxed{20. The final answer is $18$. I hope}",
        "#### 18",
        "<answer>18</answer>",
        "18",
    ],
)
def test_only_the_final_answer_counts(text):
    assert _verdict(text).score == 0.0


def test_golds_of_any_type():
    grader = MathGrader()
    assert [v.score for v in grader.grade([r"\boxed{27}"] * 3, answer=[27.0, 27, "27.0"])] == [1.0, 1.0, 1.0]


def test_answers_vote():
    grader = MathGrader()
    assert grader.votes
    assert grader.same_answer(r"\frac12", "0.5")
    assert grader.same_answer("5", "x = 5")
    assert grader.same_answer("x = 5", "5")
    assert not grader.same_answer("0.5", "0.6")


@pytest.mark.parametrize(
    "gold",
    [12345678901234567890.0, -(2.0**53), float("nan"), float("inf"), True, datetime.date(2024, 5, 1), [18], b"18"],
)
def test_golds_that_are_not_what_was_written_are_refused(gold):
    with pytest.raises(
        ValueError, match=r"a number with all its digits, got .*: write the answers of this column as text"
    ):
        success.grade(["18", "18"], answer=["18", gold])


@pytest.mark.parametrize("gold", [2**70, 27.0, 0.5, decimal.Decimal("12345678901234567890.5")])
def test_golds_may_be_numbers(gold):
    assert _verdict(rf"\boxed{{{gold}}}", gold).score == 1


def test_mistakes_of_the_user():
    with pytest.raises(ValueError, match="column 'answer', which the data set lacks"):
        success.grade(["18"])
    for golds in (["18"], ["18", None]):
        with pytest.raises(ValueError, match="got 2 completions, and the column 'answer' has not one answer for each"):
            success.grade(["18", "18"], answer=golds)
    with pytest.raises(ValueError, match="answer_format must be one of boxed, hash, tag, got 'xml'"):
        MathGrader("xml")  # type: ignore[arg-type]
    for seconds in (0, 1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"cpu_seconds must be from 0.01 to 3600, got"):
            MathGrader(cpu_seconds=seconds)


def test_without_math_verify(monkeypatch):
    monkeypatch.setattr("troll_lab.rewards.mathematics.grader.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "troll-rl\[tasks\]"'):
        success.grade([r"\boxed{18}"], answer=["18"])


def test_it_travels():
    _verdict(r"\boxed{\frac{36}{2}}")  # its processes run
    for copied in (copy.deepcopy(success), pickle.loads(pickle.dumps(MathGrader("boxed")))):
        assert copied([], [r"\boxed{\frac{36}{2}}"], answer=["18"]) == [1.0]


def test_verl_calls_it():
    assert compute_score("gsm8k", r"\boxed{\frac{36}{2}}", "18") == {"score": 1.0, "acc": True, "pred": r"\frac{36}{2}"}
    assert compute_score("gsm8k", "18", "18", extra_info={}) == {"score": 0.0, "acc": False, "pred": ""}
    assert compute_score("gsm8k", "#### 18", "18", None, answer_format="hash", sandbox_fusion_url=None)["score"] == 1.0
    hostile = compute_score("gsm8k", "\\boxed{\x1b[31m\ud800}", "18")["pred"]
    assert hostile.isprintable()
    assert hostile.encode("utf-8")
    with ThreadPoolExecutor(8) as threads:
        scores = threads.map(lambda i: compute_score("d", rf"\boxed{{\frac{{{i}}}{{2}}}}", "9")["score"], range(64))
    assert list(scores) == [float(i == 18) for i in range(64)]


# ---- the real data


@pytest.fixture(params=FILES)
def name(request):
    return request.param


@pytest.fixture(params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def some_rows(request, name):
    rows = problems(name)
    return rows if request.param == "all" else rows[:: max(1, len(rows) // 12)]


def _accepted(grader, cases):
    """The cases, each a completion and a gold answer, that score 1."""
    verdicts = grader.grade([text for text, _ in cases], answer=[gold for _, gold in cases])
    return [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.success]


def test_every_gold_answer_scores_1_in_its_solution(name, grader):
    rows = problems(name)
    assert len(rows) == ROWS[name]
    cases = [(row.solved(grader.answer_format), row.gold) for row in rows]
    if name == "minerva_math" and grader.answer_format == "boxed":
        cases += [(row.solution, row.gold) for row in rows]
    assert _accepted(grader, cases) == cases


def test_math_verify_agrees_with_the_gold_answers(some_rows):
    # Asked directly: `compare` takes equal texts for equal answers without it.
    golds = sorted({row.gold for row in some_rows})
    assert ask([(gold, gold) for gold in golds], 5.0) == [Comparison.EQUAL] * len(golds)


def _rewritten(gold):
    """The same number in other words."""
    text, value = gold.lstrip("+").replace(",", ""), number(gold)
    if value is None:
        return
    yield from (f"x = {text}", rf"{text} \text{{ units}}", rf"{text}\,\mathrm{{cm}}^2", rf"\${text}", rf"{text}^\circ")
    yield from (f"{text} dollars", f"{text}.", f"$ {text} $")
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        yield rf"{mantissa} \times 10^{{{int(exponent)}}}"
    elif "." in text:
        yield from (f"{text}0", rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    else:
        yield from (f"{text}.00", rf"\dfrac{{{2 * int(text)}}}{{2}}", f"{int(text) - 1} + 1", f"{int(text):,}")
        yield from (f"x = {int(text):,}", rf"{int(text):,} \text{{ units}}", f"${int(text):,} dollars$")


def _redrawn(gold):
    """The same answer in LaTeX that only looks different."""
    latex = gold.replace("np.arcsin", r"\arcsin")
    yield from (rf"\boldsymbol{{{latex}}}", rf"{{\color{{red}}{latex}}}", rf"\large {latex}", rf"\({latex}\)")
    yield f"{{{latex}}}"
    if "frac" in latex:
        yield from (latex.replace(r"\frac", r"\dfrac"), latex.replace(r"\frac", r"\tfrac"))
    if "(" in latex and r"\left" not in latex:
        yield latex.replace("(", r"\bigl(").replace(")", r"\bigr)")
    if "e^" in latex:
        yield from (latex.replace("e^", rf"{e}^") for e in (r"\mathrm{e}", r"{\rm e}", r"\operatorname{e}"))
    if r"\pi" in latex:
        yield re.sub(r"\\pi(?![a-z])", "π", latex)
    if re.search(r"_\{?\w\b", latex):
        yield re.sub(r"_(\w)\b|_\{(\w)\}", r"_{\\text{\1\2}}", latex)


def test_a_gold_answer_in_other_words_or_looks_scores_1(some_rows):
    forms = [(form, row) for row in some_rows for form in (*_rewritten(row.gold), *_redrawn(row.gold))]
    assert len(forms) >= 5 * len(some_rows)
    cases = [(row.solved("boxed", form), row.gold) for form, row in forms]
    assert _accepted(MathGrader(), cases) == cases


def test_spoiled_answers_score_0(some_rows):
    cases = [(row.solved("boxed", wrong), row.gold) for row in some_rows for wrong in spoiled(row.gold)]
    assert len(cases) > 10 * len(some_rows)
    assert _accepted(MathGrader(), cases) == []


def test_no_answer_or_one_in_passing_scores_0(some_rows, grader):
    cases = []
    for row in some_rows:
        no = row.solved(grader.answer_format, "1234567")
        cases += [(f"{row.solution.replace('boxed', 'text')} It is {row.gold}.", row.gold)]
        cases += [(f"It is {MARKED[grader.answer_format] % row.gold}.\nNo:\n{no}", row.gold)]
        cases += [(f"It is {row.gold}.\n{no}", row.gold)]
    assert _accepted(grader, cases) == []
