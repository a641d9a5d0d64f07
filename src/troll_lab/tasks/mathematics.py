"""Tasks with a mathematical answer. To add a data set: one declaration at the end of this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from troll.settings import number
from troll_lab.rewards.answers import INSTRUCTIONS, AnswerFormat, FormatReward, final_answer
from troll_lab.rewards.mathematics import MathGrader
from troll_lab.rewards.mathematics.texts import PLAIN_NUMBER
from troll_lab.tasks.dataset_task import DatasetOptions, Example, PromptStyle, dataset_task, without
from troll_lab.tasks.registry import Reward, Task, TaskConfig, TaskError, register_task
from troll_lab.tasks.rows import Column, Row
from troll_lab.tasks.splits import Source

_TEMPLATE = "{question}\n{instruction}"

# Without braces, TeX boxes one token: with more text after it, the answer would be cut short.
_BARE_BOX = re.compile(r"\\boxed(?![A-Za-z])\s*(\\[A-Za-z]+|[^\s{}\\$])(?=[.,;:!?]*(?:[\s$)}]|\\[\])]|$))")
# A text without a box is an answer, unless it looks like a solution.
_LONGEST_ANSWER = 200

_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d\S*)?")

# Instructions in the data sets' questions. If a model is asked for two formats, one of them must be wrong.
_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
_EURUS = (r"Present the answer in LaTex format: \boxed{Your answer}",)


@dataclass(frozen=True)
class MathOptions(DatasetOptions):
    """The options of a task of mathematics.

    Attributes:
        answer_format: How answers are asked for and read.
        positive_symbols: Whether symbols stand for positive numbers, as in physics.
        format_reward: The weight of a reward of 1 for any answer in the format; None for no such reward.
    """

    answer_format: AnswerFormat = "boxed"
    positive_symbols: bool = False
    format_reward: float | None = number(None, "finite and above 0")


def mathematics(name: str, about: str, source: Source, **settings: Any) -> None:
    r"""Registers a task: questions in text, each with one answer that math-verify can compare.

    Args:
        name: The name that users type.
        about: What it asks, in one sentence.
        source: Its data set.
        **settings: More arguments of `load_mathematics`.
    """

    def load(config: TaskConfig, argument: str) -> Task:
        return load_mathematics(config, source, **settings)

    register_task(name, trains=source.train is not None, about=about)(load)


def load_mathematics(
    config: TaskConfig,
    source: Source,
    *,
    gold: Callable[[str], str] | None = None,
    instructions: tuple[str, ...] = (),
    **defaults: Any,
) -> Task:
    r"""Loads a task of mathematics, with the options of `MathOptions`.

    Args:
        config: The options, the sizes, and local data to take instead of the source.
        source: Its data set, with columns for `prompt` and `answer`.
        gold: A function that extracts the answer from the text of its column, and raises ValueError if there is none;
            by default `boxed_or_whole`.
        instructions: Sentences about the form of the answer, which are removed from questions.
        **defaults: The task's own defaults of options.

    Returns:
        The task. Its data sets have the columns `prompt` and `answer` (only the answer).

    Raises:
        TaskError: If math-verify is missing, an option is unknown or unusable, the data cannot be reached or read, or a
            row lacks its question or its answer.
    """
    check_math_verify()
    options = config.read_options(MathOptions, **defaults)
    grader = MathGrader(options.answer_format, positive_symbols=options.positive_symbols)
    rewards: list[tuple[Reward, float]] = [(grader, 1.0)]
    if options.format_reward is not None:
        rewards.append((FormatReward(options.answer_format), options.format_reward))

    def read(row: Row) -> Example:
        question, answer = without(row.text("prompt"), *instructions), row.answer("answer")
        if _DATE.fullmatch(answer):
            what = "a date, which mathematics reads as a difference of numbers"
            raise row.unfit("answer", what, 'write it in words, such as "1 May 2024"')
        try:
            return Example(question, {"answer": (gold or boxed_or_whole)(answer)})
        except ValueError as error:
            raise row.error(f"has no answer in its field {row.columns['answer']!r}: {error}") from error

    return dataset_task(
        config,
        source,
        options,
        read=read,
        style=PromptStyle(_TEMPLATE, INSTRUCTIONS[options.answer_format]),
        rewards=rewards,
    )


def check_math_verify() -> None:
    """Checks before training that answers can be compared.

    Raises:
        TaskError: If math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise TaskError('this task needs math-verify: pip install "troll-rl[tasks]"')


def boxed_or_whole(text: str) -> str:
    r"""Returns the content of the last `\boxed{}` or `\boxed X` of a solution, or the whole of an answer without a box.

    Raises:
        ValueError: If the last box is empty, its braces do not balance, or they are missing around more than one token;
            or if a text without a box has several lines, a `####` or more than 200 characters.
    """
    text = re.sub(r"\\fbox(?![A-Za-z])", r"\\boxed", text)
    if r"\boxed" not in text:
        if "\n" in text or "####" in text or len(text) > _LONGEST_ANSWER:
            raise ValueError(
                f"it is a solution without a \\boxed{{}}, {text[-60:]!r}; name the column that holds only the answer, "
                "by task_options {columns: {answer: NAME}} (what follows #### is read by the task gsm8k)"
            )
        return text
    text = _BARE_BOX.sub(r"\\boxed{\1}", text)
    answer = final_answer(text, "boxed")
    if answer is None or final_answer(text[text.rfind(r"\boxed") :], "boxed") is None:
        raise ValueError(f"its last box is empty or open, {text[-60:]!r}")
    return answer


def after_hashes(solution: str) -> str:
    """Returns the number after the last `####` of a GSM8K solution, without thousands separators.

    Raises:
        ValueError: If the solution lacks `####`, or a number after it.
    """
    _, marker, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not PLAIN_NUMBER.fullmatch(answer):
        raise ValueError(f"it must end in '#### <number>', got {solution[-60:]!r}")
    return answer


_COLUMNS = {"prompt": Column(("problem", "question")), "answer": Column(("answer", "solution"))}
_COMPETITIONS = "Problems of mathematics competitions."

mathematics(
    "gsm8k",
    "Word problems of primary school, whose answer is a number.",
    Source("openai/gsm8k", {**_COLUMNS, "answer": Column(("answer",))}, "main"),
    gold=after_hashes,
)
mathematics("math", _COMPETITIONS, Source("nlile/hendrycks-MATH-benchmark", _COLUMNS))
mathematics(
    "dapo_math",
    "Problems of mathematics competitions, whose answer is a whole number.",
    Source(
        "open-r1/DAPO-Math-17k-Processed",
        {"prompt": Column(("prompt",)), "answer": Column(("reward_model.ground_truth", "solution"))},
        "all",
    ),
    instructions=_DAPO,
)
mathematics(
    "eurus_math",
    "Problems of mathematics, from school to olympiads.",
    Source(
        "PRIME-RL/Eurus-2-RL-Data",
        {"prompt": Column(("prompt",)), "answer": Column(("reward_model.ground_truth",))},
        held_out="validation",
        only=("ability", "math"),
    ),
    instructions=_EURUS,
)
mathematics("math500", _COMPETITIONS, Source("HuggingFaceH4/MATH-500", _COLUMNS, train=None))
mathematics(
    "aime24",
    "Problems of AIME 2024, whose answer is a whole number.",
    Source("HuggingFaceH4/aime_2024", _COLUMNS, train=None, held_out="train"),
)
mathematics("amc23", "Problems of AMC 2023, whose answer is a number.", Source("math-ai/amc23", _COLUMNS, train=None))
mathematics(
    "minerva_math",
    "Problems of physics and other sciences at university.",
    Source("math-ai/minervamath", _COLUMNS, train=None),
    positive_symbols=True,
)
mathematics(
    "omni_math",
    "Problems of mathematics olympiads.",
    Source("KbsdJames/Omni-MATH", _COLUMNS, train=None),
    skip_unanswered=True,
)
