import json

import pytest
from datasets import Dataset
from rich.console import Console

from troll.grading import Verdict
from troll_lab.rewards.code import CodeGrader
from troll_lab.rewards.mathematics import MathGrader
from troll_lab.tasks import Task, TaskConfig, TaskError, load_task
from troll_lab.tasks.check import check, restated_answer, restated_program, show, size, spoiled_answer, spoiled_program


def _mathematics(write, *golds, **options):
    rows = [{"problem": f"Question {number}?", "answer": gold} for number, gold in enumerate(golds)]
    return load_task(TaskConfig("math500", write("golds.jsonl", rows), eval_size=None, task_options=options))


def _code(tests, references):
    rows = Dataset.from_dict({"prompt": ["?"] * len(tests), "tests": [json.dumps(each) for each in tests]})
    return Task("own", rows.select([]), rows, [CodeGrader()], references=references)


@pytest.mark.parametrize(
    ("gold", "restated", "spoiled"),
    [
        ("72", r"\frac{144}{2}", "73"),
        ("-1,000", r"\frac{-2000}{2}", "-999"),
        ("0.25", r"\frac{0.50}{2}", "1.25"),
        (r"\sqrt{2}", r"x = \sqrt{2}", r"\sqrt{2}, 1234567"),
        (r"(1, \frac{1}{2})", r"x = (1, \frac{1}{2})", r"(1, \frac{1}{2}), 1234567"),
        ("1, 2", None, "1, 2, 1234567"),
        ("x = 5", None, "x = 5, 1234567"),
        (r"x \le 5", None, r"x \le 5, 1234567"),
        ("east", None, "east, 1234567"),
        ("B", "x = B", "B, 1234567"),
    ],
)
def test_golds_are_restated_and_spoiled(gold, restated, spoiled):
    assert restated_answer(gold) == restated
    assert spoiled_answer(gold) == spoiled
    grader = MathGrader()
    texts = [rf"\boxed{{{each}}}" for each in (restated or gold, spoiled)]
    assert [verdict.score for verdict in grader.grade(texts, answer=[gold] * 2)] == [1.0, 0.0]


def test_programs_are_restated_and_spoiled():
    program = "def double(x):  # twice\n    return (2 *\n        x)\nprint(double(int(input())))\n"
    assert restated_program(program) == "def double(x):\n    return 2 * x\nprint(double(int(input())))"
    assert spoiled_program(program) == "def double(x):\n    return None\nNone"


def test_check_passes_golds_that_agree(write):
    task = _mathematics(write, "72", "72", r"\sqrt{2}", "1, 2")
    advanced: list[int] = []
    report = check(task, advance=advanced.append)
    assert report.counts == {("itself", True): 3, ("restated", True): 2, ("spoiled", True): 3}
    assert report.passed
    assert report.disagreements == []
    console = Console(record=True, width=120)
    show(report, console)
    assert "verdict" not in console.export_text()  # no table of disagreements
    assert sum(advanced) == size(task) == 4
    assert check(task, limit=1).counts == {("itself", True): 1, ("restated", True): 1, ("spoiled", True): 1}
    assert size(task, limit=3) == 3


@pytest.mark.parametrize(
    ("answer_format", "unread", "kinds"),
    [
        ("boxed", "{1, 2", ["itself"]),
        ("tag", "1</answer>2", ["itself"]),
        ("boxed", "special.erf(10/13)", ["restated"]),  # can be matched in one spelling only
    ],
)
def test_check_finds_golds_that_cannot_be_matched(write, answer_format, unread, kinds):
    report = check(_mathematics(write, "72", unread, answer_format=answer_format))
    assert report.passed == ("itself" not in kinds)
    assert report.counts["itself", True] == 2 - (not report.passed)
    (trial, verdict), *_ = [each for each in report.disagreements if each[0].kind in kinds]
    assert (trial.row, trial.gold) == ("held-out 1", unread)
    assert not verdict.success


def test_check_counts_unscored_trials_apart(write, monkeypatch):
    task = _mathematics(write, "72")
    unscored = Verdict(None, "72", "unscored: \x1b[31mno processes")
    monkeypatch.setattr(MathGrader, "grade", lambda self, completions, **columns: [unscored] * len(completions))
    report = check(task)
    assert report.passed
    assert report.counts == {("itself", None): 1, ("restated", None): 1, ("spoiled", None): 1}
    console = Console(record=True, width=120)
    show(report, console)
    page = console.export_text()
    assert "no processes" in page
    assert "\x1b" not in page


def test_report_shows_the_first_20_disagreements(write):
    console = Console(record=True, width=200)
    show(check(_mathematics(write, *(f"special.erf({number}/13)" for number in range(1, 31)))), console)
    page = console.export_text()
    assert "x = special.erf(1/13)" in page
    assert "... and 10 more." in page


@pytest.mark.needs_bubblewrap
def test_check_grades_code_by_its_solutions():
    tests = {"asserts": ["assert double(4) == 8"]}
    weak = {"asserts": ["assert callable(double)"]}
    right = "def double(x):  # twice\n    return 2 * x\n"
    task = _code([tests, tests, tests, weak], [right, "def double(x):\n    return x\n", None, right])
    report = check(task)
    assert report.without == 1
    kinds = ("itself", "restated", "spoiled")
    assert report.counts == {(kind, agrees): 1 + agrees for kind in kinds for agrees in (True, False)}
    assert not report.passed
    found = {(trial.row, trial.kind) for trial, _ in report.disagreements}
    assert found == {("held-out 1", "itself"), ("held-out 1", "restated"), ("held-out 3", "spoiled")}
    assert check(_code([tests], ["def double(x:"])).counts == {("itself", False): 1}


@pytest.mark.needs_bubblewrap
def test_check_needs_mathematics_or_code_with_solutions():
    with pytest.raises(TaskError, match="task 'own' has tests, but no solutions"):
        check(_code([{"asserts": ["assert f() == 1"]}], [None]))
    rows = Dataset.from_dict({"prompt": ["?"]})
    for rewards in ([lambda **_: [1.0]], []):
        with pytest.raises(TaskError, match="has a reward of its own"):
            check(Task("own", rows, rows, rewards))
