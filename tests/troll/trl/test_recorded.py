"""The reader of vLLM's log-probabilities in TRL's lists, on what a real vLLM reported of a tiny model."""

from typing import Any

import pytest
import torch

from tests.tolerance import within
from tests.vllm.recorded import ERROR, MASS_THRESHOLD, PROMPTS, TOP_K, VOCAB_SIZE, Record, check_policy, records
from troll.trl.anchor import EngineTopLogprobs, report_top_log_probs

RECORDS = records()


class Recorded:
    """In the place of TRL's `VLLMGeneration`, with its `generate`."""

    def __init__(self, record: Record, source: str) -> None:
        self._completions = getattr(record, source)

    def generate(self, prompts: Any, images: Any, num_generations: int) -> tuple[Any, ...]:
        return prompts, *(list(part) for part in zip(*self._completions, strict=True))


@pytest.mark.parametrize("source", ["colocated", "server"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.sampling)
def test_the_policies_are_those_that_sampled_the_tokens(record: Record, source: str) -> None:
    vllm: Any = Recorded(record, source)
    reports = EngineTopLogprobs()
    report_top_log_probs(vllm, TOP_K, reports)
    prompts, completion_ids, completions, token_ids = vllm.generate(PROMPTS, None, 1)
    assert prompts == PROMPTS and completion_ids == [completion.ids for completion in getattr(record, source)]
    # vLLM's own first entry is the likeliest token's.
    assert token_ids == [[[token] for token in ids] for ids in completion_ids]
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "top_k": TOP_K, "mass_threshold": MASS_THRESHOLD}
    for prompt, ids, completion in zip(PROMPTS, completion_ids, completions, strict=True):
        tokens, rows = torch.tensor([ids]), torch.tensor([[row for (row,) in completion]])
        mask, truncated = torch.ones_like(tokens), record.sampling != "whole"
        (packed,) = reports.policies(rows, tokens, mask, truncated=truncated, **settings)
        policy = packed.unpack()
        check_policy(policy, record, prompt, ids)
        torch.testing.assert_close(reports.log_probs(rows)[0], policy.log_prob, rtol=0, atol=within(ERROR))
