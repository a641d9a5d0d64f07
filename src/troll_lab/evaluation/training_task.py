"""`task.json`: the task that a model was trained on and its prompts, kept with the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from troll.files import json_text, read_json, write_atomically
from troll_lab.evaluation.config import EvaluationError
from troll_lab.tasks import TaskConfig
from troll_lab.tasks.registry import is_file

TASK_FILE = "task.json"


@dataclass(frozen=True)
class TrainingTask:
    """The prompts of a model's training.

    Attributes:
        task: The name of the task, or the absolute path of a custom task; None for a custom task on another machine.
        dataset_path: The absolute path of local data; None for the hub's, or if the task generates its problems.
        task_options: The options of the task: its prompt, system prompt and answer format, among others.
        eval_size: The number of held-out problems; None for all.
        chat_template_kwargs: The variables of the chat template.

    Raises:
        ValueError: If a field has another type.
    """

    task: str | None
    dataset_path: str | None
    task_options: Mapping[str, Any]
    eval_size: int | None
    chat_template_kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        types = {"task": str | None, "dataset_path": str | None, "eval_size": int | None}
        for field in fields(self):
            if not isinstance(getattr(self, field.name), types.get(field.name, Mapping)):
                raise ValueError(f"{field.name} cannot be {getattr(self, field.name)!r}")

    @classmethod
    def of(cls, config: TaskConfig, chat_template_kwargs: Mapping[str, Any] | None) -> TrainingTask:
        """The task of a run, with absolute paths, so that they hold in any working directory of this machine."""
        path = None if config.dataset_path is None else str(Path(config.dataset_path).expanduser().resolve())
        return cls(_absolute(config.task), path, config.options, config.eval_size, dict(chat_template_kwargs or {}))

    def is_task(self, name: str) -> bool:
        """Whether a task's name, as typed, means this task."""
        return _absolute(name) == self.task

    def write(self, folder: Path) -> None:
        """Writes `task.json` into a folder."""
        write_atomically(folder / TASK_FILE, json_text(asdict(self), indent=2, ensure_ascii=False) + "\n")


def find_training_task(model: str, revision: str | None = None) -> TrainingTask | None:
    """Reads the `task.json` of a model.

    Args:
        model: A folder (of a run, its model, a checkpoint, or a copy of one of them), or a name on the hub.
        revision: The branch, tag or commit of a model on the hub.

    Returns:
        Its training task; None if `troll train` has not written one. A training task from the hub has neither local
        data nor a task that is a file: an upload must not choose which files of this machine run.

    Raises:
        EvaluationError: If the file is not what `troll train` writes.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        try:
            path = Path(hf_hub_download(model, TASK_FILE, revision=revision))
        except (EntryNotFoundError, OSError, ValueError):  # loading the model will raise if it cannot be reached
            return None
        found = _read(path)
        return replace(found, task=None if is_file(found.task or "") else found.task, dataset_path=None)
    # An incomplete checkpoint has no task.json yet, but its run has.
    places = (folder, folder / "model", folder.resolve().parent)
    return next((_read(place / TASK_FILE) for place in places if (place / TASK_FILE).is_file()), None)


def from_here(path: str) -> str:
    """A path relative to the working directory, if it is below that; otherwise the absolute path."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _read(path: Path) -> TrainingTask:
    names = [field.name for field in fields(TrainingTask)]
    try:
        content = read_json(path)
        return TrainingTask(**{name: content.get(name) for name in names})  # type: ignore[arg-type]
    except ValueError as error:
        raise EvaluationError(
            f"{path} is not what troll train writes ({error}): remove it, and name the task with --task"
        ) from error


def _absolute(task: str) -> str:
    if not is_file(task):
        return task
    path, colon, argument = task.partition(":")
    return f"{Path(path).expanduser().resolve()}{colon}{argument}"
