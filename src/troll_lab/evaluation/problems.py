"""A task for an evaluation: the texts of the prompts, and the judgement of completions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troll.grading import Grader, Verdict
from troll.huggingface.token_ids import REMEDY
from troll_lab.evaluation.config import EvaluationError
from troll_lab.evaluation.estimators import SameAnswer
from troll_lab.evaluation.model import fingerprint
from troll_lab.tasks import TaskConfig, load_task
from troll_lab.tasks.chat_template import prompt_texts


@dataclass(frozen=True)
class Problems:
    """The held-out rows of a task.

    Attributes:
        name: The name of the task.
        prompts: The prompts in the data set: strings or conversations.
        texts: The prompts as the model reads them.
        ids: The token ids of the texts.
        columns: The other columns, which the reward reads.
        reward: The reward that judges completions.
        fingerprint: A hash of all prompts, tokens and other columns, and of the user's files that define the task.
    """

    name: str
    prompts: Sequence[Any]
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    reward: Callable[..., list[float | None]]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def same_answer(self) -> SameAnswer | None:
        """Whether two answers count as one in a majority vote; None if they cannot be compared."""
        return self.reward.same_answer if isinstance(self.reward, Grader) and self.reward.votes else None

    def check_ids(self, rows: int, tokenizer: Any) -> None:
        """Raises EvaluationError if a prompt has a token outside the model's embedding of `rows` rows."""
        for row, ids in enumerate(self.ids):
            if max(ids) >= rows:
                raise EvaluationError(
                    f"task {self.name!r}: the prompt of problem {row} has the token "
                    f"{tokenizer.convert_ids_to_tokens(max(ids))!r} (id {max(ids)}), and the model's embedding has "
                    f"{rows} rows: {REMEDY}"
                )

    def judge(self, rows: Sequence[int], completions: Sequence[str]) -> list[Verdict]:
        """Judges B completions of the problems in B rows."""
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        if isinstance(self.reward, Grader):
            return self.reward.grade(completions, **columns)
        prompts = [self.prompts[row] for row in rows]
        written = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        scores = self.reward(prompts=prompts, completions=written, **columns)
        if outside := [score for score in scores if score is not None and not 0 <= score <= 1]:
            raise EvaluationError(f"task {self.name!r}: a score must be between 0 and 1, got {outside[0]}")
        return [
            Verdict(None, None, "unscored: the reward function returned None")
            if score is None
            else Verdict(float(score), None, "correct" if score == 1 else "wrong")
            for score in scores
        ]


def load_problems(config: TaskConfig, tokenizer: Any, template_options: Mapping[str, Any]) -> Problems:
    """Loads the held-out rows of a task, as conversations if the tokenizer has a chat template.

    Args:
        config: The task, its options and its size.
        tokenizer: The model's tokenizer.
        template_options: Further variables of the chat template.

    Raises:
        troll_lab.tasks.TaskError: If the task cannot be loaded, or the chat template refuses its prompts.
        EvaluationError: If the task cannot tell success from failure, or has images, a prompt without a token, or a
            reward that needs more than troll eval passes.
    """
    conversational = tokenizer.chat_template is not None
    task = load_task(config, conversational=conversational)
    if not task.has_success:
        raise EvaluationError(f"task {task.name!r} cannot tell success from failure, so there is nothing to evaluate")
    reward: Any = task.reward_funcs[0]
    rows = task.eval_dataset
    if "images" in rows.column_names:
        raise EvaluationError(f"task {task.name!r} has images, and troll eval reads text only")
    prompts = list(rows["prompt"])
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    _check_call(reward, columns, task.name)
    texts = prompt_texts(tokenizer, prompts, task.name, template_options)
    # A chat template has written the special tokens already.
    ids = tokenizer(texts, add_special_tokens=not conversational)["input_ids"]
    if empty := [row for row, tokens in enumerate(ids) if not tokens]:
        raise EvaluationError(f"task {task.name!r}: the prompt of problem {empty[0]} has no token")
    files = [hashlib.sha256(path.read_bytes()).hexdigest() for path in task.files]
    return Problems(task.name, prompts, texts, ids, columns, reward, fingerprint([ids, columns, files]))


def _check_call(reward: Callable[..., Any], columns: Mapping[str, Any], task: str) -> None:
    try:
        inspect.signature(reward).bind(prompts=[], completions=[], **columns)
    except TypeError as error:
        raise EvaluationError(
            f"task {task!r}: its reward takes other arguments ({error}) than troll eval passes, which are prompts, "
            f"completions and the data set's columns {', '.join(columns) or '(none)'}: give further ones a default"
        ) from None
