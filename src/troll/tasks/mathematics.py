"""What tasks with a mathematical answer share."""

from importlib.util import find_spec

from troll.tasks.registry import TaskError

#: Ends a prompt whose answer `troll.rewards.math.success` finds.
INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."


def check_math_verify() -> None:
    """Finds out before training whether answers can be checked.

    Raises:
        TaskError: If math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise TaskError('this task needs math-verify: pip install "troll-rl[tasks]"')
