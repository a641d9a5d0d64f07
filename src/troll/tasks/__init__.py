import troll.tasks.gsm8k
import troll.tasks.reasoning_gym  # noqa: F401  (both imports register their tasks)
from troll.tasks.registry import Task, TaskConfig, TaskError, load_task, register_task

__all__ = ["Task", "TaskConfig", "TaskError", "load_task", "register_task"]
