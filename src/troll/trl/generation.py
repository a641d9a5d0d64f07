"""Generation for rollout functions."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object

from troll.trl import checks, seam


def complete(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
    """Samples a completion of each of N prompts with the trainer's sampling settings; for rollout functions.

    Every process must call it equally often, since the processes share an engine or sharded weights; the numbers of
    prompts may differ, and be 0.

    Args:
        trainer: The second argument of the rollout function.
        prompts: The token ids of this process's prompts.

    Returns:
        The token ids of N completions, each up to its end or of `max_completion_length` tokens; and the engine's
        log-probabilities of these tokens, None without an engine. With `anchor="rollout"` they are numbers to pass on
        unchanged as `logprobs`, not log-probabilities.
    """
    # All processes ask about equally many prompts, since TRL finds its own among a server's answers by their number.
    number = max(1, *gather_object([len(prompts)]))
    filler = [checks.tokenizer_of(trainer).pad_token_id]
    completions, log_probs = seam.completions(trainer, [*prompts, *[filler] * (number - len(prompts))])
    return completions[: len(prompts)], None if log_probs is None else log_probs[: len(prompts)]
