"""Tasks: a data set, its prompts and its rewards under one name.

`registry.py` has the type `Task`, the configuration, and the names. `loading.py` loads a task by its name, or from a
user's file. A task of a data set reads rows (`rows.py`) of training and held-out splits (`splits.py`), and becomes a
`Task` in `dataset_task.py`: those of `mathematics.py`, `code.py` and `prompts.py` do. `geometry3k.py` makes its own,
since its rows hold images, and `reasoning_gym.py` and `free_text.py` generate their questions. `check.py` grades the
gold answers of a task.
"""

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
