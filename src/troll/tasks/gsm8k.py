from collections.abc import Collection

from datasets import Dataset

from troll.rewards.math import success
from troll.tasks.mathematics import INSTRUCTION, check_math_verify
from troll.tasks.registry import Task, TaskConfig, TaskError, register_task
from troll.tasks.splits import read_splits, text_of

HUB_NAME = "openai/gsm8k"


@register_task("gsm8k")
def load(config: TaskConfig, argument: str = "") -> Task:
    r"""Loads GSM8K: grade-school word problems whose answer is a number.

    The hub's `openai/gsm8k` (`main`), or `config.dataset_path` (see `troll.tasks.splits.read_splits`). Rows have the
    fields `question` and `answer`, where `answer` ends in `#### <number>`. A held-out question is dropped from
    training.

    Args:
        config: Path and sizes; all training rows and at most `eval_size` of the test rows by default.
        argument: Unused: the task takes none.

    Returns:
        The task. Its data sets have the columns `prompt` and `answer` (the number alone, without commas).

    Raises:
        TaskError: If the data cannot be reached or read, or a row lacks its question or its answer.
    """
    check_math_verify()
    if config.options:
        raise TaskError(f"task 'gsm8k' takes no task_options, got {', '.join(config.options)}")
    train, test = read_splits(config, HUB_NAME, "main")
    held_out = _to_prompts(test, "test")
    return Task(
        name=config.task,
        train_dataset=_to_prompts(train, "train", exclude=set(held_out["prompt"])),
        eval_dataset=held_out,
        reward_funcs=[success],
    )


def gold_answer(solution: str) -> str:
    """Returns the number after the last `####` of a GSM8K solution, without thousands separators.

    Raises:
        ValueError: If there is no `####`, or no number after it.
    """
    _, marker, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker:
        raise ValueError("no '#### <number>'")
    float(answer)
    return answer


def _to_prompts(rows: Dataset, split: str, exclude: Collection[str] = ()) -> Dataset:
    prompts, answers = [], []
    for number, row in enumerate(rows):
        prompt = f"{text_of(row, 'question', split, number)}\n{INSTRUCTION}"
        if prompt in exclude:
            continue
        prompts.append(prompt)
        solution = text_of(row, "answer", split, number)
        try:
            answers.append(gold_answer(solution))
        except ValueError as error:
            raise TaskError(
                f"{split} row {number} (counted from 0): field 'answer' must end in '#### <number>', "
                f"got {solution[-60:]!r}"
            ) from error
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
