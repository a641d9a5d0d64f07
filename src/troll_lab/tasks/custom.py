"""Custom tasks, from a user's YAML or Python file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from troll.grading import TAKEN
from troll.settings import did_you_mean
from troll_lab.rewards.answers import INSTRUCTIONS
from troll_lab.tasks.code import load_tested
from troll_lab.tasks.dataset_task import Example, PromptStyle, dataset_task
from troll_lab.tasks.mathematics import load_mathematics
from troll_lab.tasks.options import Options
from troll_lab.tasks.registry import RewardFunc, Task, TaskConfig, TaskError
from troll_lab.tasks.rows import Column, Row
from troll_lab.tasks.splits import Source
from troll_lab.terminal import UsageError, one_line
from troll_lab.user_files import import_file
from troll_lab.values import read_yaml

# The fields of a YAML file, and their types.
_FIELDS: dict[str, type] = {
    "dataset": str,
    "eval_dataset": str,
    "dataset_config": str,
    "train_split": str,
    "eval_split": str,
    "columns": dict,
    "reward": str,
    "task_options": dict,
}
# The column that the library's rewards need next to the prompt.
_ANSWERS = {"math": "answer", "code": "tests"}


def load_file(config: TaskConfig) -> Task:
    """Loads a task of the user's from a Python or a YAML file.

    A Python file, `path.py[:argument]`, defines `load(config, argument)`, a function with the signature that
    `register_task` requires: it returns a `Task` whose prompts are plain text. docs/tasks.md describes the fields of a
    YAML file. Its `task_options` are defaults for those of `config`, and `config.dataset_path` replaces its data. Paths
    in it are relative to it.

    Raises:
        TaskError: If the file is missing or cannot be read, its function is missing or returns something else, or one
            of its fields is unknown, missing or unusable; names the file and the field.
    """
    name, _, argument = config.task.partition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise TaskError(f"task {config.task!r}: there is no file {path}")
    if path.name.endswith(".py"):
        return _load_python(path, config, argument)
    if argument:
        raise TaskError(f"task {config.task!r}: a YAML file takes no argument after a colon")
    return _load_yaml(path, config)


def _load_python(path: Path, config: TaskConfig, argument: str) -> Task:
    load = getattr(_import(path), "load", None)
    if not callable(load):
        raise TaskError(f"{path} must define load(config, argument), which returns a troll_lab.tasks.Task")
    task = load(config, argument)
    if not isinstance(task, Task):
        raise TaskError(f"load in {path} must return a troll_lab.tasks.Task, got {type(task).__name__}")
    return replace(task, files=[path])


def _load_yaml(path: Path, config: TaskConfig) -> Task:
    fields = _read(path)
    columns = {name: Column((column,)) for name, column in fields["columns"].items()}
    local, source = _data(path, fields)
    config = replace(
        config,
        dataset_path=config.dataset_path or local,
        task_options={**fields.get("task_options", {}), **config.options},
    )
    if config.dataset_path != local:
        source = replace(source, held_out_file=None)
    reward = fields["reward"]
    if reward in _ANSWERS:
        if set(columns) != {"prompt", _ANSWERS[reward]}:
            names = f"prompt and {_ANSWERS[reward]} for this reward, got {', '.join(columns)}"
            raise TaskError(f"{path}: columns must name {names}")
        if reward == "math":
            task = load_mathematics(config, source, columns=columns)
        else:
            task = load_tested(config, source, columns=columns)
        return replace(task, files=[path])
    function, file = load_function(reward, path.parent, f"{path}: reward", *_ANSWERS)
    task = _load_rewarded(config, source, columns, function)
    return replace(task, files=[path, file] if file else [path])


def _load_rewarded(config: TaskConfig, source: Source, columns: dict[str, Column], reward: RewardFunc) -> Task:
    """A task whose reward gets all columns except the prompt, as text, under the names of the YAML file."""
    options = Options(config)
    instructions = {"none": ""} | INSTRUCTIONS
    instruction = instructions[options.choice("answer_format", list(instructions))]
    template = "{question}\n{instruction}" if instruction else "{question}"

    def read(row: Row) -> Example:
        return Example(row.text("prompt"), {name: row.answer(name) for name in columns if name != "prompt"})

    return dataset_task(
        config,
        source,
        options,
        columns=columns,
        read=read,
        style=PromptStyle(template, template, instruction),
        rewards=[(reward, 1.0)],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = read_yaml(path)
    except ValueError as error:
        raise TaskError(str(error)) from error
    for name, value in fields.items():
        if name not in _FIELDS:
            hint = did_you_mean(str(name), _FIELDS) or f"; it has {', '.join(_FIELDS)}"
            raise TaskError(f"{path}: unknown field {name!r}{hint}")
        if not isinstance(value, _FIELDS[name]):
            kind = "a mapping" if _FIELDS[name] is dict else "a text"
            raise TaskError(f"{path}: {name} must be {kind}, got {value!r}")
    for name in ("dataset", "columns", "reward"):
        if name not in fields:
            raise TaskError(f"{path}: field {name!r} is missing")
    columns = fields["columns"]
    if "prompt" not in columns or not all(isinstance(each, str) for pair in columns.items() for each in pair):
        raise TaskError(f"{path}: columns must name the data's columns, such as {{prompt: question, answer: solution}}")
    if taken := [name for name in (*TAKEN, "completion") if name in columns]:  # TRL keeps `completion` to itself
        raise TaskError(
            f"{path}: columns: a reward cannot get a column under the name {taken[0]!r}, which TRL uses for something "
            f"else: choose another, such as gold: {columns[taken[0]]}"
        )
    return fields


def _data(path: Path, fields: dict[str, Any]) -> tuple[str | None, Source]:
    """The path of the local data, None if the file names none; and the hub's data set."""
    local = path.parent / Path(fields["dataset"]).expanduser()
    source = Source(
        fields["dataset"],
        fields.get("dataset_config"),
        train=fields.get("train_split", "train"),
        held_out=fields.get("eval_split", "test"),
    )
    if not local.exists():
        if "eval_dataset" in fields:
            raise TaskError(f"{path}: eval_dataset goes with a local dataset, and there is no {local}")
        if fields["dataset"].count("/") != 1 or Path(fields["dataset"]).suffix in (".json", ".jsonl", ".parquet"):
            raise TaskError(f"{path}: dataset: there is no {local}, and it is not a name on the hub such as owner/name")
        return None, source
    if "eval_dataset" in fields:
        source = replace(source, held_out_file=path.parent / Path(fields["eval_dataset"]).expanduser())
    return str(local), source


def load_function(name: str, folder: Path, label: str, *others: str) -> tuple[Callable[..., Any], Path | None]:
    """Loads a function of the user's, and returns it with the file that defines it, or None for a module's.

    Args:
        name: `FILE.py:function` or `module:function`.
        folder: The folder that a file's path is relative to.
        label: The field or option with the name, for errors.
        *others: Other possible values of the field, for errors.

    Raises:
        TaskError: If there is no such function, or its file or module cannot be imported.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        takes = ", ".join((*others, "FILE.py:function or module:function"))
        raise TaskError(f"{label} must be {takes}, got {name!r}")
    if module.endswith(".py"):
        source = folder / Path(module).expanduser()
        if not source.is_file():
            raise TaskError(f"{label}: there is no file {source}")
        found = _import(source)
    else:
        try:
            found = importlib.import_module(module)
        except Exception as error:  # a user's module can raise anything
            raise TaskError(f"{label}: cannot import {module}: {one_line(error)}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise TaskError(f"{label}: {module} has no function {attribute!r}")
    file = getattr(found, "__file__", None)
    return function, None if file is None else Path(file)


def _import(path: Path) -> ModuleType:
    try:
        return import_file(path)
    except UsageError as error:
        raise TaskError(str(error)) from error
