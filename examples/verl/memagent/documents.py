"""Writes what the memory agent trains on: sums of five terms, and the toy model, which has seen sums of three.

python documents.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "cpu"))

from toy_data import quickstart_task, write_model, write_questions

from troll.tasks.reasoning_gym import DEFAULT_TRAIN_SIZE, questions


def prepare(folder: Path) -> None:
    """Writes `model`, `train.parquet` and `test.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    task = quickstart_task()
    write_model(folder / "model", task, seed=0)
    options = {**task.options, "min_terms": 5, "max_terms": 5}
    for file, split, size in (("train", "train", DEFAULT_TRAIN_SIZE), ("test", "eval", task.eval_size or 512)):
        asked = questions(task.task.partition(":")[2], options, split=split, size=size)
        write_questions(folder / f"{file}.parquet", task, asked)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
