"""The rollout function of the recipe `memory-agent`: a sum is read term by term, into a memory that is overwritten."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from troll.trl import complete
from troll.trl.conversations import EARLIER

#: What stands between the terms of a sum, and after the last one.
_BETWEEN, _ASKED = r" (?=[+-] )", " ="


def rollout(prompts: list[str], trainer: Any, remember: Callable[[str], str] = str) -> dict[str, Any]:
    """Reads sums such as `9 + 4 - 2 =`, a term at a time; the last conversation answers from memory only.

    The first conversation reads `9 =`. What it answers is the memory, and stands before the next term: if the answers
    are right, the others read `9 + 4 =` and `13 - 2 =`. The last one reads `11 =`.

    Args:
        prompts: Sums without a chat template, as `reasoning_gym:chain_sum` asks for them by `"{expression} ="`.
        trainer: The `TrollTrainer`.
        remember: What of an answer becomes the memory; all of it by default.
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
