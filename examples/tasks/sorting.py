"""Sort numbers: `troll train RECIPE --task examples/tasks/sorting.py`, or `sorting.py:8` for eight of them."""

import random
from typing import Any

from datasets import Dataset

from troll.rewards.answers import final_answer
from troll.rewards.completion import completion_text
from troll.tasks import Task, TaskConfig


def success(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the last <answer> is the sorted list."""
    given = [final_answer(completion_text(completion), "tag") for completion in completions]
    return [float(found == right) for found, right in zip(given, answer, strict=True)]


def load(config: TaskConfig, argument: str) -> Task:
    """The task; what stands after the colon in its name is the length of the lists."""
    size = config.train_size or 1000
    held_out = config.eval_size or 256
    draw = random.Random(0)
    lists = list({tuple(draw.sample(range(100), k=int(argument or 5))): None for _ in range(2 * (size + held_out))})
    rows = Dataset.from_dict(
        {
            "prompt": [f"Sort {list(each)}. Put the list in <answer></answer>." for each in lists],
            "answer": [str(sorted(each)) for each in lists],
        }
    )
    return Task(
        name=config.task,
        train_dataset=rows.select(range(size)),
        eval_dataset=rows.select(range(size, size + held_out)),
        reward_funcs=[success],
    )
