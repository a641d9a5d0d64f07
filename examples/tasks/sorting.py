"""Sort numbers: `troll train RECIPE --task examples/tasks/sorting.py`, or `sorting.py:8` for eight of them."""

import random
import zlib
from typing import Any

from datasets import Dataset

from troll_lab.rewards import completion_text, final_answer
from troll_lab.tasks import Task, TaskConfig


def success(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the last <answer> is the sorted list."""
    given = [final_answer(completion_text(completion), "tag") for completion in completions]
    return [float(found == right) for found, right in zip(given, answer, strict=True)]


def load(config: TaskConfig, argument: str) -> Task:
    """The task; the argument after the colon in its name is the length of the lists."""
    draw = random.Random(0)
    lists = dict.fromkeys(tuple(draw.sample(range(100), k=int(argument or 5))) for _ in range(10_000))
    # The content of a list determines whether it is held out, so the split is the same for all sizes.
    held_out = [each for each in lists if zlib.crc32(bytes(each)) % 8 == 0]
    learned = [each for each in lists if zlib.crc32(bytes(each)) % 8 != 0]
    return Task(
        name=config.task,
        train_dataset=rows(learned[: config.train_size]),
        eval_dataset=rows(held_out[: config.eval_size]),
        reward_funcs=[success],
    )


def rows(lists: list[tuple[int, ...]]) -> Dataset:
    """The prompt and the answer of each list."""
    prompts = [f"Sort {list(each)}. Put the list in <answer></answer>." for each in lists]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(sorted(each)) for each in lists]})
