"""Open-ended text: continue a sentence in a given style. Many answers can be right."""

import ast
import functools
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from troll.grading import completion_text
from troll.settings import number
from troll_lab.rewards.style import Style
from troll_lab.tasks.registry import RewardFunc, Task, TaskConfig, TaskError, register_task
from troll_lab.tasks.splits import Split, sixteenth

NAME = "free_text"

# The sixteenths of the paragraphs in each split: a language model needs most of them to learn to write.
SIXTEENTHS: dict[Split, range] = {"eval": range(2), "train": range(2, 5), "warmup": range(5, 16)}

# Prose, not a listing, a table or a grammar: it begins like a sentence and ends like one.
_PROSE = re.compile(r"[\"'(]?[A-Z][^|{}<>]*[.:]")
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[\"'(]?[A-Z])")
_LEAST_WORDS = 12


@dataclass(frozen=True)
class FreeTextOptions:
    """The options of the task.

    Attributes:
        words: As in `Style`.
        tolerance: As in `Style`.
        prompt_words: The number of words of a sentence that the model is given.
    """

    words: int = number(Style.words, "an integer, at least 1")
    tolerance: int = number(Style.tolerance, "an integer, at least 0")
    prompt_words: int = number(4, "an integer, at least 1")


@register_task(NAME, about="Beginnings of sentences, each to be continued as one sentence in a style.")
def load(config: TaskConfig, argument: str = "") -> Task:
    """Loads the beginnings of sentences, each to be continued as one sentence in a style.

    The text comes with Python: its reference manual (`pydoc_data.topics`) and the docstrings of the standard library's
    modules. That is half a million characters of English prose on every machine, without a download; it differs a
    little between versions of Python.

    There are two rewards: `success` is 1.0 if all requirements of the style are met, and `style` is a graded score (see
    `troll_lab.rewards.style.Style`). The options are those of `FreeTextOptions`.

    Raises:
        TaskError: If an option is unknown or out of its range, or `dataset_path` is given.
    """
    if config.dataset_path is not None:
        raise TaskError(f"task {NAME!r} has its own text: remove dataset_path={config.dataset_path}")
    options = config.read_options(FreeTextOptions)
    held_out = _beginnings(paragraphs("eval"), options.prompt_words)
    # All held-out prompts, not only those that are evaluated: a larger eval_size must not find training prompts.
    not_learned = set(held_out)
    train = [prompt for prompt in _beginnings(paragraphs("train"), options.prompt_words) if prompt not in not_learned]
    return Task(
        name=config.task,
        train_dataset=Dataset.from_dict({"prompt": train[: config.train_size]}),
        eval_dataset=Dataset.from_dict({"prompt": held_out[: config.eval_size]}),
        held_out_questions=not_learned,
        reward_funcs=_rewards(Style(options.words, options.tolerance)),
    )


def paragraphs(split: Split) -> list[list[str]]:
    """Returns the paragraphs of one split, each as its sentences."""
    return [_SENTENCE_END.split(text) for text in _prose() if sixteenth(text) in SIXTEENTHS[split]]


@functools.cache
def _prose() -> tuple[str, ...]:
    """All paragraphs without duplicates, each in one line."""
    found: dict[str, None] = {}  # an ordered set
    for text in (*pydoc_data.topics.topics.values(), *_docstrings()):
        for block in text.split("\n\n"):
            paragraph = " ".join(block.split())
            if _PROSE.fullmatch(paragraph) and len(paragraph.split()) >= _LEAST_WORDS:
                found[paragraph] = None
    return tuple(found)


def _docstrings() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _beginnings(texts: Iterable[list[str]], prompt_words: int) -> list[str]:
    """The first words of each longer sentence, without duplicates."""
    sentences = (sentence.split() for sentences in texts for sentence in sentences)
    return list(dict.fromkeys(" ".join(words[:prompt_words]) for words in sentences if len(words) > prompt_words))


def _rewards(style: Style) -> list[RewardFunc]:
    def success(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return [float(style.is_met(completion_text(completion))) for completion in completions]

    def style_score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return [style.score(completion_text(completion)) for completion in completions]

    style_score.__name__ = "style"
    return [success, style_score]
