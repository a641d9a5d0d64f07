import ast
from pathlib import Path

import pytest

from tests import mutation
from tests.mutation import ROOT as PROJECT
from tests.mutation import Mutant, draw, plant, possible_mutants, room_of

SOURCE = '''"""A docstring with 3 words."""
LIMIT: int | None = 5


def small(x: int | None, *, é: bool = True) -> bool:
    if x is None or (x) not in (1, 2):
        raise ValueError("no")
    print(
        x
    )
    é = not é
    return x + 1 <= LIMIT
'''


def changed_texts() -> set[str]:
    source = SOURCE.encode()
    return {(source[:begin] + after.encode() + source[end:]).decode() for begin, end, after in possible_mutants(source)}


def test_possible_mutants_change_operators_and_statements() -> None:
    for before, after in (
        ("= 5", "= 6"),
        ("= True", "= False"),
        ("x is None", "x is not None"),
        ("None or", "None and"),
        ("not in", "in"),
        ("(1, 2)", "(2, 2)"),
        ("(1, 2)", "(1, 3)"),
        ('raise ValueError("no")', "pass"),
        ("print(\n        x\n    )", "pass"),
        ("= not é", "= é"),
        ("x + 1", "x - 1"),
        ("x + 1", "x + 2"),
        ("<= LIMIT", "< LIMIT"),
    ):
        assert SOURCE.replace(before, after) in changed_texts()
    assert len(changed_texts()) == 13
    for text in changed_texts():  # leaves texts and annotations
        assert "A docstring with 3 words." in text and text.count("int | None") == 2
        ast.parse(text)


def test_plant_follows_a_line_that_has_moved_and_been_indented() -> None:
    mutant = Mutant("core", "core/x.py", 12, 9, "return x + 1 <= LIMIT", "+", "-")
    assert plant(SOURCE.encode(), mutant) == SOURCE.replace("x + 1", "x - 1").encode()
    moved = f"if LIMIT:\n    {SOURCE.replace(chr(10), chr(10) + '    ')}"
    assert plant(moved.encode(), mutant) == moved.replace("x + 1", "x - 1").encode()
    assert plant(SOURCE.replace("x + 1", "x + 2").encode(), mutant) is None, "the line is gone"
    statement = Mutant("core", "core/x.py", 3, 0, "print(", "print(\n        x\n    )", "pass")
    another = SOURCE.replace("LIMIT:", "print(\n    5\n)\nLIMIT:")  # nearer, but not the same statement
    assert plant(another.encode(), statement) == another.replace("print(\n        x\n    )", "pass").encode()


def test_draw_is_reproducible_and_its_mutants_can_be_planted() -> None:
    drawn = draw(20, seed=3)
    assert drawn == draw(20, seed=3)
    assert len(set(drawn)) == 20
    for mutant in drawn:
        assert plant((PROJECT / "src" / mutant.file).read_bytes(), mutant) is not None


@pytest.mark.parametrize(
    ("file", "folder", "mirrored"),
    [
        ("troll/trust_region/projection.py", "troll/trust_region", "troll/trust_region/test_projection.py"),
        ("troll_lab/runs/grid.py", "troll_lab/runs", "troll_lab/runs/test_grid.py"),
        ("troll_lab/lock.py", "troll_lab/test_cli.py", "troll_lab/test_lock.py"),
        ("troll_sandbox/limits.py", "troll_sandbox", "troll_sandbox/test_limits.py"),
    ],
)
def test_tests_of_a_mutant_begin_with_its_mirror(file: str, folder: str, mirrored: str) -> None:
    """Then follow its folder, or the files next to it."""
    tests = PROJECT / "tests"
    mutant = Mutant(room_of(Path(file)), file, 1, 0, "", "", "")
    mirror, rest = mutation.tests_of(mutant, PROJECT)
    assert mirror == [str(tests / mirrored)]
    assert rest[0] == str(tests / folder)
    assert rest[-2:] == ["--deselect", f"tests/{mirrored}"]


def test_tests_of_a_killed_mutant_begin_with_its_killers() -> None:
    killers = "troll/test_files.py::test_one[a b] troll/test_files.py::test_two troll/gone.py::test_three timeout"
    mutant = Mutant("troll", "troll/files.py", 1, 0, "", "", "", "killed", killers)
    files = PROJECT / "tests" / "troll" / "test_files.py"
    assert mutation.tests_of(mutant, PROJECT)[0] == [f"{files}::test_one", f"{files}::test_two"]
