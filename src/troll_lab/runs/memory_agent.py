"""The rollout function of the recipe `memory-agent`: reads a sum term by term, with a memory that is overwritten."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from troll.trl import complete
from troll_lab.trl.conversations import EARLIER

#: The separators between the terms of a sum, and the end of a sum.
_BETWEEN, _ASKED = r" (?=[+-] )", " ="


def rollout(prompts: list[str], trainer: Any, remember: Callable[[str], str] = str) -> dict[str, Any]:
    """Reads sums such as `9 + 4 - 2 =`, a term at a time; the last conversation answers from memory only.

    The prompt of the first conversation is `9 =`. Its answer is the memory, which the next prompt puts before the next
    term: if the answers are right, the prompts are `9 + 4 =` and `13 - 2 =`. The last prompt is `11 =`.

    Args:
        prompts: Sums without a chat template: prompts of `reasoning_gym:chain_sum` by the template `"{expression} ="`.
        trainer: The `LabTrainer`.
        remember: A function from an answer to the memory; by default the whole answer.
    """
    tokenizer = trainer.processing_class
    sums = [re.split(_BETWEEN, prompt.removesuffix(_ASKED)) for prompt in prompts]
    memories, earlier = [""] * len(sums), [list[dict[str, Any]]() for _ in sums]

    def asked(terms: list[str]) -> tuple[list[list[int]], list[list[int]], list[list[float]] | None]:
        texts = [f"{memory} {term}".strip() + _ASKED for memory, term in zip(memories, terms, strict=True)]
        prompt_ids = tokenizer(texts)["input_ids"]
        return prompt_ids, *complete(trainer, prompt_ids)

    for place in range(max(map(len, sums))):
        reading = [place < len(terms) for terms in sums]  # a shorter sum has been read
        prompt_ids, completion_ids, log_probs = asked([terms[place] if place < len(terms) else "" for terms in sums])
        answers = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        for i in (i for i, goes_on in enumerate(reading) if goes_on):
            memories[i] = remember(answers[i])
            several = {"prompt_ids": prompt_ids[i], "completion_ids": completion_ids[i]}
            earlier[i].append(several if log_probs is None else several | {"logprobs": log_probs[i]})
    prompt_ids, completion_ids, log_probs = asked([""] * len(sums))
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": log_probs, EARLIER: earlier}
