"""The options of ``troll eval``, as settings of an evaluation."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from troll.evaluation.config import EvaluationConfig
from troll.evaluation.errors import EvaluationError
from troll.tasks import TaskConfig


def configuration(arguments: Namespace) -> EvaluationConfig:
    """Reads what was typed.

    Args:
        arguments: Of the command line, by the options' names.

    Raises:
        EvaluationError: If options do not fit each other, or a value is out of its range.
        troll.tasks.TaskError: If options of a task are not a JSON object, or `eval_size` is below one.
    """
    paths = by_task("dataset_path", arguments.dataset_path, arguments.task)
    options = by_task("task_options", arguments.task_options, arguments.task)
    tasks = [
        TaskConfig(
            task=name,
            dataset_path=paths.get(name),
            task_options=options.get(name),
            train_size=1,  # rows to train on would be read, or generated, for nothing
            eval_size=arguments.eval_size,
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
        output_dir=arguments.output_dir,
    )


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
