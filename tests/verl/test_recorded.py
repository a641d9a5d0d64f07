"""The reader of vLLM's arrays of log-probabilities, on what a real vLLM reported of a tiny model."""

import asyncio
from typing import Any

import pytest

from tests.verl.vllm_engine import EngineCoreOutput, LogprobsLists, OutputProcessor, SamplingParams
from tests.vllm.recorded import MASS_THRESHOLD, PROMPTS, TOP_K, VOCAB_SIZE, Record, check_policy, records
from troll.trust_region.policy.serialized import from_records
from troll.verl import old_policy_record
from troll.verl.vllm_rollout import TopLogProbs


class Recorded:
    """An engine that sends the recorded arrays of a completion again, a message a token, as it was recorded."""

    def __init__(self, record: Record, number: int) -> None:
        self.output_processor = OutputProcessor()
        self._ids, self._log_probs = record.arrays[number]

    async def generate(self, *, sampling_params: SamplingParams, request_id: str, **_: Any) -> Any:
        state = self.output_processor.add_request(f"{request_id}-1f", request_id, sampling_params)
        for ids, log_probs in zip(self._ids, self._log_probs, strict=True):
            ranks = (log_probs[1:] > log_probs[:1]).sum(keepdims=True) + 1
            lists = LogprobsLists(ids[None], log_probs[None], ranks)
            self.output_processor.process_outputs([EngineCoreOutput(state.request_id, [int(ids[0])], lists)])
            yield state.output


@pytest.mark.parametrize("record", records(), ids=lambda record: record.sampling)
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_the_record_is_the_policy_that_sampled_the_tokens(record: Record, number: int) -> None:
    engine = TopLogProbs(Recorded(record, number), TOP_K)

    async def run() -> list[Any]:
        params = SamplingParams(logprobs=0)
        return [x async for x in engine.generate(prompt=PROMPTS[number], sampling_params=params, request_id="a")]

    ids = record.colocated[number].ids
    assert asyncio.run(run())[-1].outputs[0].token_ids == ids
    reported = engine.taken("a")
    assert reported is not None and reported[0][:, 0].tolist() == ids
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "top_k": TOP_K, "mass_threshold": MASS_THRESHOLD}
    made = old_policy_record(*reported, **settings, truncated=record.sampling != "whole")
    check_policy(from_records([made]).unpack(), record, PROMPTS[number], ids)
