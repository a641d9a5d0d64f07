"""The options of `troll eval`, as settings of an evaluation."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from troll_lab.evaluation.config import EvaluationConfig, EvaluationError
from troll_lab.evaluation.training_task import TrainingTask, from_here
from troll_lab.tasks import TaskConfig
from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, json_object, least_train_size

#: Task options about prompts in general: a model that was trained with them needs them on other tasks too.
_SHARED_OPTIONS = ("answer_format", "system_prompt")


def configuration(arguments: Namespace, trained: TrainingTask | None) -> EvaluationConfig:
    """Reads the command line; settings that are not given are those of the model's training, if these are known.

    The task that the model was trained on has the data, options and size of training, and every task has the variables
    of the chat template. The command overrides single options and variables; null removes one.

    Raises:
        EvaluationError: If a task is missing, options do not fit each other, or a value is out of its range.
        troll_lab.tasks.TaskError: If options that are JSON objects are something else, or `eval_size` is below one.
    """
    names = arguments.task or ([from_here(trained.task)] if trained is not None and trained.task is not None else [])
    if not names:
        model = arguments.model
        if trained is not None:
            raise EvaluationError(f"{model} was trained on a task of another machine: name a task with --task")
        if Path(model).expanduser().is_dir():
            raise EvaluationError(f"{model} has no task.json of troll train: name a task with --task")
        raise EvaluationError(
            f"there is no folder {model}: check the path; for a model on the hub, name a task with --task"
        )
    paths = by_task("dataset_path", arguments.dataset_path, names)
    options = by_task("task_options", arguments.task_options, names)
    text = arguments.chat_template_kwargs
    variables = {} if text is None else json_object("chat_template_kwargs", text)
    tasks = []
    for name in names:
        own = trained if trained is not None and trained.is_task(name) else None
        inherited_path = None if own is None or own.dataset_path is None else from_here(own.dataset_path)
        given = TaskConfig(name, task_options=options.get(name)).options
        tasks.append(
            TaskConfig(
                task=name,
                dataset_path=paths.get(name, inherited_path),
                task_options=_merged({} if own is None else own.task_options, given),
                train_size=least_train_size(name),
                eval_size=own.eval_size if own and arguments.eval_size is None else arguments.eval_size,
            )
        )
    own_forms = ("tasks", "ks", "chat_template_kwargs")
    same_names = [field.name for field in fields(EvaluationConfig) if field.name not in own_forms]
    return EvaluationConfig(
        tasks=tasks,
        ks=arguments.k,
        chat_template_kwargs=_merged({} if trained is None else trained.chat_template_kwargs, variables),
        **{name: getattr(arguments, name) for name in same_names},
    )


def as_in_training(config: EvaluationConfig, trained: TrainingTask) -> str | None:
    """A line about the settings that an evaluation takes from the model's training; None if there are none."""
    shared: list[str] = []
    for task in config.tasks:
        if trained.is_task(task.task):
            same = {name: value for name, value in task.options.items() if trained.task_options.get(name) == value}
            shared += [f"task {task.task}"]
            shared += [f"task_options {_json(same)}"] if same else []
            path = task.dataset_path
            if path is not None and Path(path).expanduser().resolve() == Path(trained.dataset_path or ""):
                shared += [f"dataset_path {path}"]
            shared += [f"eval_size {task.eval_size}"] if task.eval_size == trained.eval_size is not None else []
    found = config.chat_template_kwargs
    variables = {name: value for name, value in found.items() if trained.chat_template_kwargs.get(name) == value}
    shared += [f"chat_template_kwargs {_json(variables)}"] if variables else []
    return f"as in training: {', '.join(shared)}" if shared else None


def other_prompts(config: EvaluationConfig, trained: TrainingTask) -> list[str]:
    """A line for each task whose prompts differ from those of the model's training."""
    lines = []
    variables = _differences("chat_template_kwargs", trained.chat_template_kwargs, config.chat_template_kwargs)
    for task in config.tasks:
        there, here = dict(trained.task_options), task.options
        if not trained.is_task(task.task):
            there, here = ({name: each[name] for name in _SHARED_OPTIONS if name in each} for each in (there, here))
        if found := _differences("task_options", there, here) + variables:
            lines.append(f"{task.task} is not prompted as the model was in training: {'; '.join(found)}")
    return lines


def training_rows(config: EvaluationConfig, trained: TrainingTask) -> list[str]:
    """A line if more rows of the file that the model was trained on are evaluated than training held out."""
    file, held_out = Path(trained.dataset_path or ""), trained.eval_size or DEFAULT_EVAL_SIZE
    return [
        f"{task.task}: training held out {held_out} rows of {file}, and eval_size is {task.eval_size}: if the file "
        "does not say which rows are held out, the others were trained on"
        for task in config.tasks
        if trained.is_task(task.task) and file.is_file() and (task.eval_size or 0) > held_out
        if task.dataset_path is not None and Path(task.dataset_path).expanduser().resolve() == file
    ]


def _differences(option: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    def shown(values: Mapping[str, Any], name: str) -> str:
        return _json(values[name]) if name in values else "not set"

    return [
        f"{option}.{name} was {shown(there, name)} and is {shown(here, name)}"
        for name in sorted({*there, *here})
        if shown(there, name) != shown(here, name)
    ]


def _merged(inherited: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    out = {name for name, value in given.items() if value is None}
    return {name: value for name, value in {**inherited, **given}.items() if name not in out}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def by_task(option: str, values: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """An option's values by task: `TASK=VALUE` for each, or only one value if there is one task.

    Raises:
        EvaluationError: If a value does not belong to a task, or a task has two.
    """
    found: dict[str, str] = {}
    for value in values:
        # The longest: one name may begin another, up to a "=" in it.
        names = sorted((name for name in tasks if value.startswith(f"{name}=")), key=len)
        if not names and (len(tasks) > 1 or len(values) > 1):
            example = " ".join(f"{name}=..." for name in tasks)
            raise EvaluationError(f"{option} {value} does not belong to a task: write --{option} {example}")
        name, given = (names[-1], value[len(names[-1]) + 1 :]) if names else (tasks[0], value)
        if name in found:
            raise EvaluationError(f"{option} is given twice for {name}: leave one out")
        found[name] = given
    return found
