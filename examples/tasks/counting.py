"""Count on: `troll train RECIPE --task examples/tasks/counting.py`, or `counting.py:100` for a hundred numbers more.

A task with long answers: 260 numbers of three digits are about a thousand tokens.
"""

import zlib
from itertools import takewhile
from typing import Any

from datasets import Dataset

from troll_lab.rewards import completion_text
from troll_lab.tasks import Task, TaskConfig

#: How many numbers a prompt has, and how many are to follow.
GIVEN, FOLLOWING = 40, 260


def share(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The share of the numbers that are there before the first mistake."""
    shares = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = right.split()
        pairs = zip(completion_text(completion).split(), numbers, strict=False)
        shares.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(numbers))
    return shares


def success(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where all numbers are there; what follows them does not count."""
    return [float(each == 1.0) for each in share(prompts, completions, answer)]


def load(config: TaskConfig, argument: str) -> Task:
    """The task; the argument after the colon in its name is how many numbers are to follow."""
    following = int(argument or FOLLOWING)
    starts = range(100, 1000 - GIVEN - following)
    held_out = [start for start in starts if zlib.crc32(str(start).encode()) % 8 == 0]
    learned = [start for start in starts if zlib.crc32(str(start).encode()) % 8 != 0]
    return Task(
        name=config.task,
        train_dataset=rows(learned[: config.train_size], following),
        eval_dataset=rows(held_out[: config.eval_size], following),
        reward_funcs=[success, share],
        reward_weights=[0.0, 1.0],  # hardly any answer is all right at first
    )


def rows(starts: list[int], following: int) -> Dataset:
    """The prompt and the answer of each number that is counted from."""
    prompts = [written(start, GIVEN) for start in starts]
    return Dataset.from_dict({"prompt": prompts, "answer": [written(start + GIVEN, following) for start in starts]})


def written(first: int, count: int) -> str:
    """So many numbers, from the first one on."""
    return " ".join(map(str, range(first, first + count)))
