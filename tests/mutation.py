"""Plants random mutants in `src/`, one at a time, and writes down which tests kill each.

    python -m tests.mutation plant TABLE --mutants 300 --seed 1                     # draws mutants, and tries them
    python -m tests.mutation plant TABLE --mutants 300 --seed 1 --rooms troll/trl   # only those of a room
    python -m tests.mutation again tests/mutation.csv                               # tries those that were killed again

`tests/mutation.csv` has 100 mutants of seed 0 and 300 of seed 1, these with at most three of the tests that kill each.

A mutant is one change of an operator, a number or a truth value, or one call, update or `raise` that is left out. Texts
stay as they are, since most of them are messages, and so do annotations. The mutants of a room are drawn evenly from
all that are possible there, and rooms get their share by lines.

The tests that may kill a mutant are those of its room: first the file that mirrors the mutated one, whose failures are
all written down, then the rest of the room, up to its first failure. Each mutant is planted in a copy of what is
committed, so the tree stays as it is. An interrupted run goes on where it stopped, and so does one of other rooms:
until all have been tried, the table's name ends in `.unfinished.csv`. `again` tries only the mutants that
were killed, by the tests that killed them first, up to the first failure: it is there to find out whether later tests
still kill them. It looks for a mutant's line where the file has changed since, and writes `gone` where the line no
longer exists.
"""

import argparse
import ast
import csv
import os
import random
import re
import signal
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO, StringIO
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from troll.files import write_atomically

ROOT = Path(__file__).parents[1]
#: Each operator of Python that is mutated, and what takes its place.
OPERATORS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "@": "*", "&": "|", "|": "&",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
    "in": "not in", "not in": "in", "and": "or", "or": "and",
}  # fmt: skip
#: Environments in which the tests of a room run, where it is not the project's own.
ENVIRONMENTS = {"troll/verl": ".venv-verl"}
#: Seconds after which tests count as failed: a mutant can loop for ever.
TIMEOUT = 900


@dataclass(frozen=True)
class Mutant:
    """A change of one place in `src/`, and the tests that notice it.

    Attributes:
        room: The folder below `src`, e.g. `troll/trl`; a package's name for the files directly in it, and for all of
            `troll_sandbox`.
        file: The path below `src`.
        line: The number of the line on which the change begins, from 1.
        column: Where on the line it begins, in bytes from the line's first character that is not a blank.
        text: The line, without its indentation.
        before: The text that is replaced, which may span several lines.
        after: The text that takes its place.
        result: `killed`, `survived`, `gone`, or empty where it has not been tried.
        killers: The tests that fail, by their node ids below `tests/`, or `timeout`, or `collection` if none runs.
    """

    room: str
    file: str
    line: int
    column: int
    text: str
    before: str
    after: str
    result: str = ""
    killers: str = ""


def possible_mutants(source: bytes) -> Iterator[tuple[int, int, str]]:
    """All mutants of a file: the bytes at which the change begins and ends, and the text that takes its place.

    Args:
        source: A Python file.
    """
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def start(node: ast.expr | ast.stmt) -> int:
        return begins[node.lineno - 1] + node.col_offset

    def end(node: ast.expr | ast.stmt) -> int:
        return begins[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def operators(operands: list[ast.expr]) -> Iterator[tuple[int, int, str]]:
        for left, right in pairwise(operands):
            # Between two operands stand an operator, blanks and parentheses; a comment there is not worth the trouble.
            found = re.fullmatch(r"([\s)]*)(.*?)([\s(]*)", source[end(left) : start(right)].decode())
            if found and found[2] in OPERATORS:
                begin = end(left) + len(found[1])
                yield begin, begin + len(found[2]), OPERATORS[found[2]]

    tree = ast.parse(source)
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if isinstance(annotation := getattr(node, name, None), ast.expr)
        for part in ast.walk(annotation)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        match node:
            case ast.BinOp():
                yield from operators([node.left, node.right])
            case ast.Compare():
                yield from operators([node.left, *node.comparators])
            case ast.BoolOp():
                yield from operators(node.values)
            case ast.UnaryOp(op=ast.Not()):
                yield start(node), start(node.operand), ""
            case ast.Constant(value=bool() as value):
                yield start(node), end(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield start(node), end(node), str(value + 1)
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                yield start(node), end(node), "pass"


def plant(source: bytes, mutant: Mutant) -> bytes | None:
    """The file with the mutant in it, or `None` where its place no longer exists.

    Args:
        source: The file.
        mutant: The mutant. Of several places with its text, the nearest to the old one is meant.
    """
    lines = source.splitlines(keepends=True)
    same = [number for number, line in enumerate(lines, 1) if line.strip() == mutant.text.encode()]
    before, after = mutant.before.encode(), mutant.after.encode()
    for number in sorted(same, key=lambda number: abs(number - mutant.line)):
        line = lines[number - 1]
        begin = sum(map(len, lines[: number - 1])) + len(line) - len(line.lstrip()) + mutant.column
        if source.startswith(before, begin):
            return source[:begin] + after + source[begin + len(before) :]
    return None


def room_of(file: Path) -> str:
    """The room of a file by its path below `src`."""
    package, *folders = file.parent.parts
    return package if package == "troll_sandbox" else "/".join((package, *folders[:1]))


def draw(number: int, seed: int) -> list[Mutant]:
    """Mutants of the tree, in the order of their files: for each room as many as its share of lines asks for.

    Args:
        number: How many.
        seed: The seed of the drawing.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        files.setdefault(room_of(path.relative_to(ROOT / "src")), []).append(path)
    lines = {room: sum(len(path.read_text().splitlines()) for path in paths) for room, paths in files.items()}
    exact = {room: number * count / sum(lines.values()) for room, count in lines.items()}
    share = {room: int(part) for room, part in exact.items()}
    for room in sorted(exact, key=lambda room: share[room] - exact[room])[: number - sum(share.values())]:
        share[room] += 1
    generator = random.Random(seed)
    drawn = []
    for room, paths in sorted(files.items()):
        possible = [(path, *place) for path in paths for place in possible_mutants(path.read_bytes())]
        for path, begin, end, after in generator.sample(possible, share[room]):
            source = path.read_bytes()
            line = source.count(b"\n", 0, begin) + 1
            text = source.splitlines()[line - 1]
            column = begin - source.rfind(b"\n", 0, begin) - 1 - (len(text) - len(text.lstrip()))
            file, before = path.relative_to(ROOT / "src").as_posix(), source[begin:end].decode()
            drawn.append(Mutant(room, file, line, column, text.strip().decode(), before, after))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line, mutant.column))


def tests_of(mutant: Mutant, tree: Path) -> list[list[str]]:
    """The tests that may kill a mutant, as arguments of runs of pytest.

    First those that have killed it before, then the file that mirrors its own, and then the rest.

    Args:
        mutant: The mutant.
        tree: A copy of the project.
    """
    tests, file = tree / "tests", Path(mutant.file)
    mirror = tests / file.with_name(f"test_{file.name}")
    everything = [str(tests / mutant.room)]
    if mutant.room in ("troll", "troll_lab"):
        everything = [str(path) for folder in (tests / mutant.room, tests) for path in sorted(folder.glob("test_*.py"))]
    # Without parameters: their ids may contain blanks, at which the table's list of killers is divided.
    functions = {killer.partition("[")[0] for killer in mutant.killers.split() if "::" in killer}
    known = [str(tests / name) for name in sorted(functions) if (tests / name.partition("::")[0]).is_file()]
    runs = [known] if known else []
    if not mirror.is_file():
        return [*runs, [*everything, "-x"]]
    return [*runs, [str(mirror)], [*everything, "-x", "--deselect", str(mirror.relative_to(tree))]]


def attempt(mutant: Mutant, tree: Path, options: Sequence[str] = ()) -> Mutant:
    """Plants a mutant in a copy of the project, runs the tests, and takes it out again.

    Args:
        mutant: The mutant.
        tree: The copy.
        options: Further options of pytest.

    Returns:
        The mutant with its result.
    """
    path = tree / "src" / mutant.file
    source = path.read_bytes()
    changed = plant(source, mutant)
    if changed is None:
        return replace(mutant, result="gone", killers="")
    path.write_bytes(changed)
    try:
        for tests in tests_of(mutant, tree):
            if failed := failures(mutant.room, [*tests, *options], tree):
                return replace(mutant, result="killed", killers=" ".join(failed))
    finally:
        path.write_bytes(source)
    return replace(mutant, result="survived", killers="")


def failures(room: str, tests: list[str], tree: Path) -> list[str]:
    """The tests that fail, by their node ids; empty where all pass.

    Args:
        room: The room of the mutant.
        tests: Arguments for pytest.
        tree: A copy of the project.
    """
    python = ROOT / ENVIRONMENTS.get(room, ".venv") / "bin" / "python"
    settings = {"PYTHONPATH": f"{tree / 'src'}:{tree}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", *tests]
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | settings,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return ["timeout"]
        finally:
            # A mutant may leave processes behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        output = written.read()
    if process.returncode in (0, 5) or "ERROR: not found: " in output:  # 5: every test is deselected
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return [name.removeprefix("tests/") for name in failed] or ["collection"]


def main() -> None:
    """Draws mutants where asked to, tries those without a result, and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plant", "again"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", help="try only the mutants of these rooms now (default: all)")
    options = parser.parse_args()
    unfinished = options.table.with_suffix(".unfinished.csv")
    if unfinished.exists():
        mutants = read(unfinished)
    elif options.what == "plant":
        mutants = draw(options.mutants, options.seed)
    else:
        mutants = [replace(m, result="") if m.result == "killed" else m for m in read(options.table)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "troll"
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as committed:
            committed.extractall(tree, filter="data")
        for index in track(range(len(mutants)), description="mutants"):
            if not mutants[index].result and mutants[index].room in (options.rooms or (mutants[index].room,)):
                mutants[index] = attempt(mutants[index], tree, ["-x"] if options.what == "again" else [])
                write(unfinished, mutants)
    if all(mutant.result for mutant in mutants):
        unfinished.replace(options.table)
    show(mutants)


def read(path: Path) -> list[Mutant]:
    """The mutants of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return [Mutant(room, file, int(line), int(column), *rest) for room, file, line, column, *rest in rows]


def write(path: Path, mutants: list[Mutant]) -> None:
    """Writes a table of mutants."""
    text = StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Mutant)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, mutants))
    write_atomically(path, text.getvalue())


def show(mutants: list[Mutant]) -> None:
    """Prints how many mutants of each room were killed, and which survived."""
    table = Table("room", "killed", "survived", "gone")
    results = Counter((mutant.room, mutant.result) for mutant in mutants)
    for room in sorted({mutant.room for mutant in mutants}):
        table.add_row(room, *(str(results[room, result]) for result in ("killed", "survived", "gone")))
    table.add_section()
    total = Counter(mutant.result for mutant in mutants)
    table.add_row("all", *(str(total[result]) for result in ("killed", "survived", "gone")))
    Console().print(table)
    for mutant in mutants:
        if mutant.result == "survived":
            print(f"{mutant.file}:{mutant.line}: {mutant.before!r} -> {mutant.after!r} in {mutant.text}")


if __name__ == "__main__":
    main()
