"""Shorter reasoning with a judge model: once a passage states the right answer, more passages are worth less.

    python examples/shorter_reasoning.py --model Qwen/Qwen3-0.6B --judge Qwen/Qwen3-0.6B

Rewards of tokens as in DECS (arXiv 2509.25827), on GSM8K. For each passage of a completion that ends with the right
answer, the judge is asked whether it states that answer. The passages between the first one that does and the last one
of the completion are redundant, and their tokens are worth `--penalty` less than the others. All settings of
`LabConfig` are options as well.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from troll_lab.tasks import TaskConfig, load_task
from troll_lab.trl import LabConfig, LabTrainer

QUESTION = (
    "A passage of a solution to a problem in mathematics:\n\n{passage}\n\n"
    "Does this passage state that the final answer of the problem is {answer}? Reply with yes or no only."
)
#: A passage ends with an empty line.
PASSAGE_END = re.compile(r"\n\s*\n")


class Judge:
    """A chat model that says whether a passage states an answer.

    Args:
        model: Its name or folder.
        batch_size: Passages that it reads at once.
    """

    def __init__(self, model: str, batch_size: int = 32) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model, device_map="auto").eval()
        self._yes, self._no = (self._tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, passages: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """Whether each passage states the answer next to it: yes has a larger logit than no."""
        found: list[bool] = []
        asked = [QUESTION.format(passage=p, answer=a) for p, a in zip(passages, answers, strict=True)]
        for start in range(0, len(asked), self._batch_size):
            turns = [[{"role": "user", "content": text}] for text in asked[start : start + self._batch_size]]
            batch: Any = self._tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
                enable_thinking=False,  # Qwen3's; templates without it ignore it
            )
            logits = self._model(**batch.to(self._model.device), logits_to_keep=1).logits[:, -1]
            found += (logits[:, self._yes] > logits[:, self._no]).tolist()
        return found


class ShortSolution:
    """The reward of a right answer, of which redundant tokens get less.

    Args:
        is_right: The reward of the whole completion, above 0 if its answer is right.
        judge: Takes n passages and n answers, and says of each passage whether it states its answer.
        penalty: How much less a redundant token is worth than the other tokens of a right answer.
    """

    __name__ = "short_solution"

    def __init__(self, is_right: Any, judge: Any, penalty: float) -> None:
        self._judge, self._penalty = judge, penalty
        self.grader = is_right  # what it cannot judge is left out of the rollout

    def __call__(self, **columns: Any) -> list[float]:
        """The rewards of B completions."""
        return self.grader(**columns)

    def of_tokens(
        self,
        completion_ids: Sequence[Sequence[int]],
        rewards: Sequence[float],
        answer: Sequence[str],
        tokenizer: Any,
        **columns: Any,
    ) -> list[list[float] | None]:
        """The worth of each token; None for a completion with a wrong answer, or without redundant tokens."""

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        texts = [
            decode(ids).rstrip() if reward > 0 else "" for ids, reward in zip(completion_ids, rewards, strict=True)
        ]
        # Where each passage ends, in characters. The last one is never redundant, so it is not judged.
        ends = [[found.end() for found in PASSAGE_END.finditer(text)] for text in texts]
        passages = [passage for text in texts for passage in PASSAGE_END.split(text)[:-1]]
        golds = [gold for gold, to in zip(answer, ends, strict=True) for _ in to]
        states = iter(self._judge(passages, golds))
        worths: list[list[float] | None] = []
        for ids, reward, to in zip(completion_ids, rewards, ends, strict=True):
            stating = [end for end in to if next(states)]
            if not stating:
                worths.append(None)
                continue
            first, last = (
                bisect_left(range(len(ids)), length, key=lambda count: len(decode(ids[:count])))
                for length in (stating[0], to[-1])
            )
            worths.append([reward - self._penalty * (first <= place < last) for place in range(len(ids))])
        return worths


@dataclass
class Options:
    """The example's own options; the settings of `LabConfig` are options as well.

    Attributes:
        model: The model to train.
        judge: The model that judges passages.
        dataset_path: A local file with GSM8K's columns, instead of the hub's data set.
        penalty: How much less a redundant token is worth than the other tokens of a right answer.
    """

    model: str
    judge: str
    dataset_path: str | None = None
    penalty: float = 0.5


def main() -> None:
    """Reads the options and trains."""
    parser = HfArgumentParser((Options, LabConfig))  # type: ignore[arg-type]  # it wants a NewType
    parser.set_defaults(
        advantage_estimator="rloo_tokens", max_completion_length=1024, output_dir="runs/shorter-reasoning"
    )
    options, training = parser.parse_args_into_dataclasses()
    # The rows of one file are split, and this evaluates nothing.
    config = TaskConfig(task="gsm8k", dataset_path=options.dataset_path, eval_size=1)
    task = load_task(config, conversational=True, for_training=True)
    trainer = LabTrainer(
        model=options.model,
        reward_funcs=ShortSolution(task.reward_funcs[0], Judge(options.judge), options.penalty),
        train_dataset=task.train_dataset,
        args=training,
    )
    trainer.train()


if __name__ == "__main__":
    main()
