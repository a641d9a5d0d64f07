"""`troll tasks check`: whether a task's reward accepts the data set's own answers, and rejects wrong ones."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate, islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from troll.grading import Grader, Verdict, printable
from troll_lab.rewards.answers import marked
from troll_lab.rewards.code import CodeGrader
from troll_lab.rewards.mathematics import MathGrader
from troll_lab.tasks.registry import Task, TaskError

#: The kinds of answers that are graded against a gold answer, and whether they are right.
KINDS = {"itself": True, "restated": True, "spoiled": False}

_AT_ONCE = 32
_SHOWN = 20
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_RELATION = re.compile(r"[<>=]|\\(?:leq?|geq?|neq?|in|approx|sim|equiv|subset)(?![a-z])|\\text|[^\x00-\x7f]")


@dataclass(frozen=True)
class Trial:
    """A completion that is graded against a gold answer.

    Attributes:
        row: The place of the row in words, for the report.
        kind: A key of `KINDS`.
        gold: The gold answer; for code, the reference solution.
        given: The answer of the completion.
        completion: The text of the completion.
        columns: The row's columns, for the reward.
    """

    row: str
    kind: str
    gold: str
    given: str
    completion: str
    columns: dict[str, Any]


@dataclass
class Report:
    """The result of a check.

    Attributes:
        counts: The number of trials by their kind and by whether the reward agreed; None where it could not judge.
        disagreements: The trials in which the reward disagreed or could not judge, with its verdicts.
        without: The number of rows without a solution to grade.
    """

    counts: Counter[tuple[str, bool | None]] = field(default_factory=Counter)
    disagreements: list[tuple[Trial, Verdict]] = field(default_factory=list)
    without: int = 0

    @property
    def passed(self) -> bool:
        """Whether the reward accepts every gold answer that it could judge."""
        return not self.counts["itself", False]


def check(task: Task, limit: int | None = None, advance: Callable[[int], None] = lambda rows: None) -> Report:
    """Grades every gold answer of a task against itself: unchanged, restated and spoiled.

    Gold answers of mathematics that repeat are graded once.

    Args:
        task: A task of mathematics or of code.
        limit: The number of rows to check, from the first; None for all.
        advance: Called with the number of rows that have been graded since the last call.

    Raises:
        TaskError: If the task is neither mathematics nor code, or its data set has no solutions.
    """
    grader, report = next(iter(task.reward_funcs), None), Report()
    rows = islice(_rows(task), limit)
    if isinstance(grader, MathGrader):
        trials = _of_mathematics(rows, grader)
    elif not isinstance(grader, CodeGrader):
        raise TaskError(f"task {task.name!r} has a reward of its own; only mathematics and code can be checked")
    elif not any(task.references):
        raise TaskError(f"task {task.name!r} has tests, but no solutions in its data set that could be checked")
    else:
        trials = _of_code(rows, task.references)
        report.without = sum(reference is None for reference in task.references[:limit])
    while checked := list(islice(trials, _AT_ONCE)):
        batch = [trial for row in checked for trial in row]
        for trial, verdict in zip(batch, _grade(grader, batch), strict=True):
            agrees = None if verdict.score is None else verdict.success == KINDS[trial.kind]
            report.counts[trial.kind, agrees] += 1
            if not agrees:
                report.disagreements.append((trial, verdict))
        advance(len(checked))
    return report


def size(task: Task, limit: int | None = None) -> int:
    """Returns the number of rows that `check` grades."""
    rows = len(task.train_dataset) + len(task.eval_dataset)
    return rows if limit is None else min(rows, limit)


def show(report: Report, console: Console) -> None:
    """Prints the counts, and the first disagreements."""
    table = Table("graded", "should be", "as it should be", "not", "unscored")
    for kind, right in KINDS.items():
        counts = [str(report.counts[kind, agrees]) for agrees in (True, False, None)]
        table.add_row(f"the gold answer {kind}", "right" if right else "wrong", *counts)
    console.print(table)
    if report.without:
        console.print(f"{report.without} rows have no solution to grade.")
    if not report.disagreements:
        return
    # Gold answers graded against themselves come first.
    found = sorted(report.disagreements, key=lambda each: list(KINDS).index(each[0].kind))
    table = Table("row (from 0)", "graded", "gold answer", "answer", "verdict", show_lines=True)
    for trial, verdict in found[:_SHOWN]:
        cells = (trial.row, trial.kind, trial.gold, trial.given, verdict.reason)
        table.add_row(*(Text(printable(cell) if "\n" not in cell else cell) for cell in cells))
    console.print(table)
    if len(found) > _SHOWN:
        console.print(f"... and {len(found) - _SHOWN} more.")


def restated_answer(gold: str) -> str | None:
    r"""Returns a gold answer of mathematics in another form: `\frac{144}{2}` for 72, `x = \pi` for `\pi`.

    Returns None for a relation, a list or words, which cannot be restated without parsing them.
    """
    if _NUMBER.fullmatch(gold):
        value = Decimal(gold.replace(",", ""))
        return rf"\frac{{{2 * value:f}}}{{2}}"
    is_unread = _is_list(gold) or _RELATION.search(gold) or re.fullmatch(r"[A-Za-z\s]{2,}", gold)
    return None if is_unread else f"x = {gold}"


def _is_list(text: str) -> bool:
    """Whether a text has a comma outside of all brackets."""
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    return any(char == "," and depth == 0 for char, depth in zip(text, depths, strict=True))


def spoiled_answer(gold: str) -> str:
    """Returns a wrong answer: the number plus one, or a list with a number that the gold answer does not have."""
    return f"{Decimal(gold.replace(',', '')) + 1:f}" if _NUMBER.fullmatch(gold) else f"{gold}, 1234567"


def restated_program(program: str) -> str:
    """Returns a program without its comments and its layout; raises SyntaxError if it is not Python."""
    return ast.unparse(ast.parse(program))


def spoiled_program(program: str) -> str:
    """Returns a program whose functions return None and print nothing; raises SyntaxError if it is not Python."""
    return ast.unparse(ast.fix_missing_locations(_Spoil().visit(ast.parse(program))))


class _Spoil(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Constant(None))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            return ast.Constant(None)
        self.generic_visit(node)
        return node


def _rows(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    for split, dataset in (("train", task.train_dataset), ("held-out", task.eval_dataset)):
        # Images in other columns would be decoded.
        wanted = [name for name in ("answer", "tests", "prefix") if name in dataset.column_names]
        for index, row in enumerate(dataset.select_columns(wanted)):
            yield f"{split} {index}", row


def _of_mathematics(rows: Iterable[tuple[str, dict[str, Any]]], grader: MathGrader) -> Iterator[list[Trial]]:
    """Yields the trials of each row; none for a gold answer that an earlier row has."""
    seen: set[str] = set()
    for place, row in rows:
        gold = str(row["answer"])
        forms = {"itself": gold, "restated": restated_answer(gold), "spoiled": spoiled_answer(gold)}
        yield [
            Trial(place, kind, gold, given, marked(given, grader.answer_format), row)
            for kind, given in forms.items()
            if given is not None and gold not in seen
        ]
        seen.add(gold)


def _of_code(rows: Iterable[tuple[str, dict[str, Any]]], references: Sequence[str | None]) -> Iterator[list[Trial]]:
    """Yields the trials of each row; none for a row without a solution."""
    for (place, row), reference in zip(rows, references, strict=False):
        program = None if reference is None else (row.get("prefix") or "") + reference
        forms = {} if program is None else {"itself": program, **_rewritten(program)}
        yield [
            Trial(place, kind, str(program), given, f"```python\n{given}\n```", row) for kind, given in forms.items()
        ]


def _rewritten(program: str) -> dict[str, str]:
    try:
        return {"restated": restated_program(program), "spoiled": spoiled_program(program)}
    except (SyntaxError, ValueError):  # then it does not pass its tests either, and the report shows it
        return {}


def _grade(grader: Grader, trials: Sequence[Trial]) -> list[Verdict]:
    if not trials:
        return []
    columns = {name: [trial.columns[name] for trial in trials] for name in trials[0].columns}
    return grader.grade([trial.completion for trial in trials], **columns)
