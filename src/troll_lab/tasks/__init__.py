"""Tasks: a data set, its prompts and its rewards under one name."""

try:
    import datasets  # noqa: F401 (first: every task is one)
except ModuleNotFoundError as error:
    if error.name != "datasets":
        raise
    raise ImportError('troll_lab.tasks needs datasets: pip install "troll-rl[tasks]"') from None

# Each module registers its tasks.
from troll_lab.tasks import code, free_text, geometry3k, mathematics, prompts, reasoning_gym  # noqa: F401
from troll_lab.tasks.loading import load_task
from troll_lab.tasks.registry import Task, TaskConfig, TaskError, register_task

__all__ = ["Task", "TaskConfig", "TaskError", "load_task", "register_task"]
