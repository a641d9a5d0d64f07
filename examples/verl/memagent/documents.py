"""Writes the memory agent's data, sums of five terms, and its model, the toy model, which has seen sums of three.

python documents.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "cpu"))

from toy_data import quickstart_task, write_model, write_questions

from troll_lab.tasks.reasoning_gym import DEFAULT_TRAIN_SIZE, questions
from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE


def prepare(folder: Path) -> None:
    """Writes `model`, `train.parquet` and `test.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    task = quickstart_task()
    write_model(folder / "model", task, seed=0)
    options = {**task.options, "min_terms": 5, "max_terms": 5}
    data_set = task.task.partition(":")[2]
    train = questions(data_set, options, split="train", size=DEFAULT_TRAIN_SIZE)
    held_out = questions(data_set, options, split="eval", size=task.eval_size or DEFAULT_EVAL_SIZE)
    write_questions(folder / "train.parquet", task, train)
    write_questions(folder / "test.parquet", task, held_out)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
