"""Tasks whose answer is a program, judged by unit tests."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from troll.settings import number
from troll_lab.rewards.code import GVISOR, CodeGrader, passed_fraction
from troll_lab.rewards.demands import PACKAGES, borrowed_packages, needs_plain
from troll_lab.rewards.tests import parse_tests
from troll_lab.tasks.dataset_task import DatasetOptions, Example, PromptStyle, Read, dataset_task, without
from troll_lab.tasks.registry import Reward, Task, TaskConfig, TaskError, register_task
from troll_lab.tasks.rows import Column, Row, Rows
from troll_lab.tasks.splits import Source
from troll_sandbox import CodeTests, Limits, SandboxError, StreamTests
from troll_sandbox.cases import Tests
from troll_sandbox.limits import MEBIBYTE
from troll_sandbox.unbounded import parse, read_json, write_json

#: The end of a message that asks for a program.
INSTRUCTION = "Write the whole program in one ```python block."

_ASKED = "{question}\n\n{instruction}"
# The text that a model without a chat template has seen most often before a program: a comment that describes it.
_COMMENT = '"""\n{question}\n"""\n'
_BORROWED = (
    "use {name} without importing it, so a program can pass them with a {name} of its own: "
    "put `{import_}` into their setup"
)
_NEEDS_PLAIN = (
    "cannot be passed from outside the program's process ({need}); task_options {{plain_tests: needed}} runs them "
    "inside, where a program can fake its verdict"
)
_IS_PLAIN = "run in the program's own process, where it can fake its verdict"
_EURUS = "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


@dataclass(frozen=True)
class CodeOptions(DatasetOptions):
    """The options of a task of code; docs/tasks.md says more of them.

    Attributes:
        partial_credit: Whether the reward is the fraction of the tests that pass, and `success` is only logged.
        cpu_seconds: As in `Limits`; None for its default.
        memory_mb: The address space of a program in MiB; None for the default of `Limits`.
        packages: As in `CodeGrader`.
        run_without_isolation: As in `CodeGrader`.
        sandbox: As in `CodeGrader`.
        compare: How printed text is compared unless the tests say it.
        plain_tests: Which tests of functions run in the program's process.
    """

    partial_credit: bool = False
    cpu_seconds: float | None = number(None, "finite and above 0")
    memory_mb: float | None = number(None, "finite and above 0")
    packages: list[str] = field(default_factory=list)
    run_without_isolation: bool = False
    sandbox: str | None = None
    compare: Literal["tokens", "numbers"] = "tokens"
    plain_tests: Literal["stated", "never", "needed", "always"] = "stated"


def load_code(config: TaskConfig, source: Source, *, read: Read, style: PromptStyle) -> Task:
    """Loads a task whose examples have the column `tests`, with the options of `CodeOptions`.

    Warns about rows whose tests need the program's process or run there, and about rows whose tests take a package's
    name from the program.

    Raises:
        TaskError: If programs cannot be isolated, an option is unknown or unusable, the data cannot be reached or read,
            or a row lacks a column that is read.
    """
    options = config.read_options(CodeOptions)
    running, grader = _Running(options), _grader(options)
    rewards: list[tuple[Reward, float]] = [(grader, 0.0 if options.partial_credit else 1.0)]
    if options.partial_credit:
        rewards.append((passed_fraction(grader), 1.0))
    task = dataset_task(
        config,
        source,
        options,
        read=lambda row: running.example(row, read(row)),
        style=style,
        rewards=rewards,
    )
    running.warn()
    return task


def _grader(options: CodeOptions) -> CodeGrader:
    try:
        limits = Limits(
            cpu_seconds=options.cpu_seconds or Limits.cpu_seconds,
            memory_bytes=int(options.memory_mb * MEBIBYTE) if options.memory_mb else Limits.memory_bytes,
        )
    except (ValueError, OverflowError) as error:  # OverflowError: more bytes than a float can count
        raise TaskError(f"task options cpu_seconds and memory_mb: {error}") from error
    try:
        return CodeGrader(
            limits=limits,
            packages=options.packages,
            run_without_isolation=options.run_without_isolation,
            sandbox=options.sandbox,
        )
    except (SandboxError, ValueError) as error:
        raise TaskError(str(error)) from error


class _Running:
    """How the options say to run the tests of a data set, and the warnings about that."""

    def __init__(self, options: CodeOptions) -> None:
        self._compare, self._plain = options.compare, options.plain_tests
        self._on_server = options.sandbox not in (None, GVISOR)
        if self._on_server and self._plain != "stated":
            raise TaskError("leave out plain_tests: on a server all tests of functions run in the program's process")
        self._noted: dict[str, list[str]] = defaultdict(list)

    def example(self, row: Row, example: Example) -> Example:
        """Returns the example with its tests checked and the options applied to them, and notes warnings."""
        text = example.columns["tests"]
        try:
            tests = parse_tests(text)
        except ValueError as error:
            raise row.error(f"has no tests in its field {row.columns['tests']!r}: {error}") from error
        fields = read_json(text)
        settings = self._settings(row, tests, fields)
        if all(getattr(tests, name) == value for name, value in settings.items()):
            return example
        return replace(example, columns={**example.columns, "tests": write_json(fields | settings)})

    def warn(self) -> None:
        """Gives each noted warning once."""
        for problem, places in self._noted.items():
            rows = f"{len(places)} rows" if len(places) > 1 else "1 row"
            warnings.warn(f"the tests of {rows}, the first {places[0]}, {problem}", stacklevel=4)

    def _settings(self, row: Row, tests: Tests, fields: dict[str, Any]) -> dict[str, Any]:
        if isinstance(tests, StreamTests):
            return {"compare": fields.get("compare", self._compare)}
        if isinstance(tests, CodeTests):
            for name in borrowed_packages(tests):
                self._noted[_BORROWED.format(name=name, import_=PACKAGES[name])].append(row.place)
        if self._on_server:
            self._noted[_IS_PLAIN].append(row.place)
            return {}
        return {"plain": self._runs_plain(row, tests, fields.get("plain"))} if isinstance(tests, CodeTests) else {}

    def _runs_plain(self, row: Row, tests: CodeTests, stated: bool | None) -> bool:
        if stated is None:
            needs = needs_plain(tests)
        else:
            needs = ['their field "plain" is true'] if stated else []
        plain = {"stated": bool(stated), "needed": bool(needs), "always": True, "never": False}[self._plain]
        if plain:
            self._noted[_IS_PLAIN].append(row.place)
        elif needs:
            self._noted[_NEEDS_PLAIN.format(need=needs[0])].append(row.place)
        return plain


@register_task("humaneval", trains=False, about="Python functions to complete, from their signature and description.")
def humaneval(config: TaskConfig, argument: str = "") -> Task:
    """Loads HumanEval: functions to complete, from their signature and description.

    A plain prompt is the unchanged beginning of the function, which a completion continues; a conversation asks for the
    whole function.
    """

    def read(row: Row) -> Example:
        prompt = row.text("prompt")
        tests = {"check": row.text("tests"), "entry_point": row.text("entry_point"), "setup": prompt}
        columns = {"tests": write_json(tests), "prefix": prompt}
        return Example(prompt, columns, reference=row.value("canonical_solution"))

    return load_code(
        config,
        Source(
            "openai/openai_humaneval",
            {
                "prompt": Column(("prompt",)),
                "tests": Column(("test",)),
                "entry_point": Column(("entry_point",)),
                "canonical_solution": Column(("canonical_solution",), required=False),
            },
            train=None,
        ),
        read=read,
        style=PromptStyle(
            "{question}", INSTRUCTION, "Complete this function.\n\n```python\n{question}```\n\n{instruction}"
        ),
    )


@register_task("mbpp", about="Short Python functions, each asked for in a sentence and by its tests.")
def mbpp(config: TaskConfig, argument: str = "") -> Task:
    """Loads MBPP: short functions, each asked for in a sentence and by its tests, which are part of the prompt.

    It reads the hub's `full` configuration, and holds out its split `test`. A local file with tasks from 11 to 510 and
    from 601 to 974 is divided as by the data set's authors: the first are held out, and the others are to train on. Of
    another local file, the last rows are held out.
    """

    def read(row: Row) -> Example:
        asserts = _asserts(row)
        if not isinstance(imports := row.value("imports") or [], list):
            raise row.error(f"has no list of imports in its field {row.columns['imports']!r}")
        setup = "\n".join([*imports, row.value("setup") or ""]).strip("\n")
        tests: dict[str, Any] = {"asserts": asserts, "setup": setup}
        reference = row.text("reference") if row.value("reference") else ""
        try:
            names = names_under_test(reference, asserts)
        except (SyntaxError, ValueError) as error:  # ValueError: a null character, before Python 3.12
            raise row.error(f"has tests or a reference that are not Python: {error}") from error
        if names:
            tests["names"] = names
        question = "\n".join((row.text("prompt").strip(), "Your code should pass these tests:", "", *asserts))
        return Example(question, {"tests": write_json(tests)}, reference=reference or None)

    return load_code(
        config,
        Source(
            "google-research-datasets/mbpp",
            {
                "prompt": Column(("text", "prompt")),
                "tests": Column(("test_list",)),
                "imports": Column(("test_imports",), required=False),  # of the sanitized configuration
                "setup": Column(("test_setup_code",), required=False),
                "reference": Column(("code",), required=False),
            },
            "full",
            divide=_as_published,
        ),
        read=read,
        style=PromptStyle(_COMMENT, INSTRUCTION, _ASKED),
    )


@register_task("eurus_code", about="Problems of programming competitions, most of them from input to output.")
def eurus_code(config: TaskConfig, argument: str = "") -> Task:
    """Loads the programming half of Eurus-2-RL-Data: competition problems, most of them from input to output."""

    def read(row: Row) -> Example:
        question, text = without(row.text("prompt"), _EURUS), row.text("tests")
        try:
            tests = eurus_tests(read_json(text))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise row.error(f"has no tests in its field {row.columns['tests']!r}: {error!r:.80}") from error
        return Example(question, {"tests": write_json(tests)})

    return load_code(
        config,
        Source(
            "PRIME-RL/Eurus-2-RL-Data",
            {"prompt": Column(("prompt",)), "tests": Column(("reward_model.ground_truth",))},
            held_out="validation",
            only=("ability", "code"),
        ),
        read=read,
        style=PromptStyle(_ASKED, INSTRUCTION),
    )


def load_tested(config: TaskConfig, source: Source) -> Task:
    """Loads a task from two columns of a data set, `prompt` and `tests`; arguments as for `load_code`.

    Tests are JSON as `parse_tests` reads it, or a list of assert statements.
    """

    def read(row: Row) -> Example:
        is_list = isinstance(row.value("tests"), list)
        tests = write_json({"asserts": _asserts(row)}) if is_list else row.text("tests")
        return Example(row.text("prompt"), {"tests": tests})

    return load_code(config, source, read=read, style=PromptStyle(_ASKED, INSTRUCTION))


def names_under_test(reference: str, asserts: Sequence[str]) -> list[str]:
    """Returns the names that a reference solution binds at its top level and its tests use.

    So if a solution is called `sum`, the tests call the program's `sum`.

    Raises:
        SyntaxError: If one of them is not Python.
    """
    tests, program = [parse(test) for test in asserts], parse(reference)
    used = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
    bound: dict[str, None] = {}
    for node in program.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = None
        else:
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            bound.update(dict.fromkeys(each.id for each in stored))
    return [name for name in bound if name in used]


def eurus_tests(found: dict[str, Any]) -> dict[str, Any]:
    """Returns tests of Eurus in the form that `parse_tests` reads.

    Lines may come as lists, and the arguments and the result of a call as JSON.

    Raises:
        KeyError, TypeError, ValueError: If they have none of the data set's forms.
    """
    inputs, outputs = found["inputs"], found["outputs"]
    name = found.get("fn_name")
    if name is None:
        return {"inputs": [_lines(each) for each in inputs], "outputs": [_lines(each) for each in outputs]}
    calls = [[read_json(line) for line in each.split("\n")] if isinstance(each, str) else each for each in inputs]
    results = [read_json(each) if isinstance(each, str) and isinstance(inputs[0], str) else each for each in outputs]
    return {"function": name, "inputs": calls, "outputs": results}


def _asserts(row: Row) -> list[str]:
    asserts = row.value("tests")
    if not isinstance(asserts, list) or not asserts or not all(isinstance(each, str) for each in asserts):
        raise row.error(f"has no list of tests in its field {row.columns['tests']!r}, got {asserts!r:.80}")
    return asserts


def _lines(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _as_published(rows: Rows) -> tuple[list[int], list[int]] | None:
    ids = rows.values("task_id")
    train = [index for index, number in enumerate(ids) if number in range(601, 975)]
    test = [index for index, number in enumerate(ids) if number in range(11, 511)]
    return (train, test) if train and test else None
