"""Writes the toy model and the data of its task in the form that verl's `main_ppo` reads.

    python toy_data.py FOLDER

`FOLDER/model` loads with transformers; `FOLDER/train.parquet` and `FOLDER/test.parquet` have verl's columns.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.resources import files
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from troll_lab.runs.toy_model import toy_model
from troll_lab.tasks.reasoning_gym import DEFAULT_TRAIN_SIZE, Question, questions
from troll_lab.tasks.registry import DEFAULT_EVAL_SIZE, TaskConfig
from troll_lab.terminal import silence_libraries
from troll_lab.values import read_yaml

# The model reads bare text, and verl applies a chat template to all it is asked.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def quickstart_task() -> TaskConfig:
    """Returns the task of the recipe `quickstart`, so that both trainers are compared on one."""
    recipe = read_yaml(Path(str(files("troll_lab") / "recipes" / "quickstart.yaml")))
    return TaskConfig(**{name: recipe[name] for name in ("task", "task_options", "eval_size")})


def demo_task() -> TaskConfig:
    """Returns the task of the demo: quickstart's sums, and the answer has to stand in brackets, `<7>`.

    The model knows the brackets, but writes them only at times. To use them always is learned in a few rollouts, as
    many as verl on a CPU has time for; to add up better takes a hundred times as many completions.
    """
    task = quickstart_task()
    options = task.options | {"answer_format": "<{answer}>"}
    warm_up = {"target_success": None, "max_steps": 900, "format_share": 0.2}
    return TaskConfig(task.task, task_options=options, eval_size=task.eval_size, warm_up=warm_up)


def write_model(folder: Path, task: TaskConfig, seed: int) -> None:
    """Writes the toy model, warmed up on its own split of the task, with a chat template."""
    shutil.copytree(toy_model(task, seed=seed), folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_questions(path: Path, task: TaskConfig, asked: list[Question]) -> None:
    """Writes questions as verl reads them, with the right answers as the task wants them written."""
    rows = [
        {
            "data_source": task.task,
            "prompt": [{"role": "user", "content": question.prompt}],
            "reward_model": {"style": "rule", "ground_truth": question.formatted_answer},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(asked)
    ]
    Dataset.from_list(rows).to_parquet(path)


def prepare(folder: Path, seed: int = 0) -> None:
    """Writes the model and both files, unless they are there.

    Args:
        folder: Where to.
        seed: Of the model's initial weights and its warm-up.
    """
    finished = folder / "test.parquet"
    if finished.exists():
        return
    task = demo_task()
    data_set = task.task.partition(":")[2]
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", task, seed)
    train = questions(data_set, task.options, split="train", size=DEFAULT_TRAIN_SIZE)
    held_out = questions(data_set, task.options, split="eval", size=task.eval_size or DEFAULT_EVAL_SIZE)
    write_questions(folder / "train.parquet", task, train)
    write_questions(finished, task, held_out)


def main() -> None:
    """Reads the command line."""
    silence_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's initial weights and its warm-up")
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
