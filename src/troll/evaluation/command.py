"""The options of ``troll eval``, as settings of an evaluation."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.evaluation.config import EvaluationConfig
from troll.evaluation.errors import EvaluationError
from troll.run_folder import read_settings
from troll.tasks import TaskConfig
from troll.tasks.registry import least_train_size


def configuration(arguments: Namespace) -> EvaluationConfig:
    """Reads what was typed.

    Args:
        arguments: Of the command line, by the options' names.

    Raises:
        EvaluationError: If options do not fit each other, a value is out of its range, or the settings of the run
            whose model is evaluated cannot be read.
        troll.tasks.TaskError: If options of a task are not a JSON object, or `eval_size` is below one.
    """
    paths = by_task("dataset_path", arguments.dataset_path, arguments.task)
    options = by_task("task_options", arguments.task_options, arguments.task)
    trained = _training_settings(arguments.model)
    tasks = [
        TaskConfig(
            task=name,
            dataset_path=paths.get(name),
            task_options=options.get(name),
            train_size=least_train_size(name),
            eval_size=_held_out_in_training(trained, name) if arguments.eval_size is None else arguments.eval_size,
        )
        for name in arguments.task
    ]
    return EvaluationConfig(
        model=arguments.model,
        tasks=tasks,
        samples=arguments.samples,
        ks=arguments.k,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        backend=arguments.backend,
        seed=arguments.seed,
        dtype=arguments.dtype,
        chat_template_kwargs=_object("chat_template_kwargs", arguments.chat_template_kwargs),
        model_revision=arguments.model_revision,
        trust_remote_code=arguments.trust_remote_code,
        output_dir=arguments.output_dir,
    )


def _training_settings(model: str) -> dict[str, Any]:
    """The ``config.yaml`` of a run, by its folder or that of its model or a checkpoint; empty for other models."""
    folder = Path(model).expanduser()
    paths = [each / "config.yaml" for each in (folder, folder.resolve().parent) if folder.is_dir()]
    try:
        return next((read_settings(path) for path in paths if path.is_file()), {})
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def _held_out_in_training(settings: Mapping[str, Any], task: str) -> int | None:
    """The `eval_size` of a run on this task; None where it was another."""
    return settings.get("eval_size") if Path(str(settings.get("task"))) == Path(task) else None


def by_task(option: str, values: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """Values of an option by task: `TASK=VALUE` each, or one value alone where there is one task.

    Args:
        option: Its name, for errors.
        values: As typed.
        tasks: The names of all tasks.

    Raises:
        EvaluationError: If a value belongs to no task, or a task has two.
    """
    found: dict[str, str] = {}
    for value in values:
        # The longest: one name may begin another, up to a "=" in it.
        names = sorted((name for name in tasks if value.startswith(f"{name}=")), key=len)
        if not names and (len(tasks) > 1 or len(values) > 1):
            example = " ".join(f"{name}=..." for name in tasks)
            raise EvaluationError(f"{option} {value} is of no task: write --{option} {example}")
        name, given = (names[-1], value[len(names[-1]) + 1 :]) if names else (tasks[0], value)
        if name in found:
            raise EvaluationError(f"{option} is given twice for {name}: leave one out")
        found[name] = given
    return found


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EvaluationError(f"{option} must be a JSON object such as '{{\"enable_thinking\": false}}', got {text}")
    return value
