"""Writes a task of troll's as verl reads it: FOLDER/train.parquet and FOLDER/test.parquet.

    python examples/verl/prepare.py gsm8k data/gsm8k
    python examples/verl/prepare.py gsm8k data/gsm8k --dataset_path my/gsm8k      # without the hub

For tasks whose answers `troll_lab.rewards.mathematics` or `troll_lab.rewards.code` judges: gsm8k, math, mbpp, ...
(docs/tasks.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from troll_lab.tasks import TaskConfig, TaskError, load_task


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--eval_size", type=int, help="held-out rows; all there are where the task has a test split")
    parser.add_argument("--dataset_path", metavar="PATH", help="local data: a file, or a folder with train and test")
    arguments = parser.parse_args()
    config = TaskConfig(arguments.task, dataset_path=arguments.dataset_path, eval_size=arguments.eval_size)
    task = load_task(config, conversational=True, for_training=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)

    def to_verl(row: dict[str, Any], index: int) -> dict[str, Any]:
        gold = row["answer"] if "answer" in row else row["tests"]
        return {
            "data_source": task.name,
            "ability": "math" if "answer" in row else "code",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"index": index},
        }

    for rows, name in ((task.train_dataset, "train"), (task.eval_dataset, "test")):
        assert rows is not None  # a task that trains has both
        gold = "answer" if "answer" in rows.column_names else "tests"
        path = arguments.folder / f"{name}.parquet"
        rows.map(to_verl, with_indices=True, remove_columns=gold).to_parquet(path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    try:
        main()
    except TaskError as error:
        sys.exit(f"prepare.py: {error}")
