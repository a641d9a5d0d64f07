"""Tasks: a data set, its prompts and its rewards under one name."""

# Each import registers its tasks.
import troll.tasks.code
import troll.tasks.free_text
import troll.tasks.geometry3k
import troll.tasks.mathematics
import troll.tasks.own
import troll.tasks.prompts
import troll.tasks.reasoning_gym  # noqa: F401
from troll.tasks.registry import Task, TaskConfig, TaskError, load_task, register_task

__all__ = ["Task", "TaskConfig", "TaskError", "load_task", "register_task"]
