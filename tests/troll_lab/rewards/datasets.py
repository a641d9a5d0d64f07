"""The real tasks with code: right programs and their tests, as the column `tests` holds them."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from troll_lab.rewards.tests import parse_tests
from troll_sandbox.cases import CodeTests

DATA = Path(__file__).parents[3].parent / "shared" / "data"


class Problem(NamedTuple):
    name: str
    program: str
    tests: str


def code_tests(text: str) -> CodeTests:
    """Tests that are code, as the column `tests` holds them."""
    tests = parse_tests(text)
    assert isinstance(tests, CodeTests)
    return tests


def rows(path: Path) -> list[dict]:
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def humaneval() -> list[Problem]:
    def problem(row: dict) -> Problem:
        tests = {"check": row["test"], "entry_point": row["entry_point"], "setup": row["prompt"]}
        return Problem(row["task_id"], row["prompt"] + row["canonical_solution"], json.dumps(tests))

    return list(map(problem, rows(DATA / "humaneval" / "HumanEval.jsonl")))


def mbpp() -> list[Problem]:
    def problem(row: dict) -> Problem:
        names = ["sum"] if "assert sum(" in row["test_list"][0] else []
        tests = {"asserts": row["test_list"], "setup": row["test_setup_code"], "names": names}
        return Problem(f"MBPP/{row['task_id']}", row["code"], json.dumps(tests))

    return list(map(problem, rows(DATA / "mbpp" / "mbpp.jsonl")))
