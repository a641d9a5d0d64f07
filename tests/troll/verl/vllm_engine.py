"""vLLM's frontend for tests and benchmarks, where vLLM cannot be installed: vLLM 0.24.0 as far as log-probabilities go.

Each class has the name and the fields of vLLM's, and does with log-probabilities what it does: `vllm/logprobs.py`,
`vllm/v1/outputs.py`, `vllm/v1/engine/__init__.py`, `logprobs.py` and `output_processor.py`. The engine's own process,
which samples, is a table of distributions.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Decode = Callable[[list[int]], list[str]]


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LogprobsLists(NamedTuple):
    """Of the new tokens of a request: (tokens, 1 + K), the sampled token's first, and (tokens,)."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    finish_reason: str | None = None


@dataclass
class SamplingParams:
    logprobs: int | None = None
    detokenize: bool = True
    stop: list[str] = field(default_factory=list)
    prompt_logprobs: int | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]


@dataclass
class RequestState:
    request_id: str
    external_req_id: str
    decode: Decode | None
    num_logprobs: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    output: RequestOutput | None = None

    def update(self, output: EngineCoreOutput) -> None:
        """What vLLM's `LogprobsProcessor` and detokeniser do with new tokens."""
        self.token_ids += output.new_token_ids
        if self.decode is not None:
            self.decode(output.new_token_ids)
        if output.new_logprobs is None:
            return
        assert self.num_logprobs is not None
        for ids_array, values_array, rank in zip(*output.new_logprobs[:3], strict=True):
            ids, values = ids_array.tolist(), values_array.tolist()
            decoded = [None] * len(ids) if self.decode is None else self.decode(ids)
            ranks = (int(rank), *range(1, self.num_logprobs + 1))
            self.logprobs.append(
                {
                    token: Logprob(value, token_rank, text)
                    for token, value, token_rank, text in zip(ids, values, ranks, decoded, strict=False)
                }
            )


class OutputProcessor:
    """Makes of what the engine's process sends what `AsyncLLM.generate` yields."""

    def __init__(self, decode: Decode | None = None) -> None:
        self.request_states: dict[str, RequestState] = {}
        self._decode = decode

    def add_request(self, request_id: str, external_req_id: str, params: SamplingParams) -> RequestState:
        decode = self._decode if params.detokenize else None
        state = RequestState(request_id, external_req_id, decode, params.logprobs)
        self.request_states[request_id] = state
        return state

    def process_outputs(self, engine_core_outputs: Sequence[EngineCoreOutput]) -> None:
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            state.update(output)
            logprobs = None if state.num_logprobs is None else state.logprobs
            completion = CompletionOutput(state.token_ids, logprobs, output.finish_reason)
            state.output = RequestOutput(state.external_req_id, [completion])
            if output.finish_reason is not None:
                del self.request_states[output.request_id]


def lists(log_probs: np.ndarray, token_ids: Sequence[int], number: int) -> LogprobsLists:
    """What vLLM's sampler gathers of (T, V) distributions: the sampled tokens, and the `number` most likely ones."""
    assert number <= log_probs.shape[-1], "vLLM's process dies of this"
    sampled = np.asarray(token_ids, dtype=np.int32)[:, None]
    top = np.argsort(-log_probs, axis=-1, kind="stable")[:, :number].astype(np.int32)
    ids = np.concatenate([sampled, top], axis=1)
    values = np.take_along_axis(log_probs, ids.astype(np.int64), axis=1).astype(np.float32)
    return LogprobsLists(ids, values, (log_probs > values[:, :1]).sum(1).astype(np.int32) + 1)


class AsyncLLM:
    """Samples `token_ids` of `log_probs` (T, V) for every request, `step` tokens at a time."""

    name = "vllm"

    def __init__(self, token_ids: list[int], log_probs: np.ndarray, step: int = 1) -> None:
        self.output_processor = OutputProcessor(lambda ids: [str(token) for token in ids])
        self.asked: list[SamplingParams] = []
        self._token_ids, self._log_probs, self._step = token_ids, log_probs, step

    async def generate(
        self, *, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append(sampling_params)
        state = self.output_processor.add_request(f"{request_id}-1f", request_id, sampling_params)
        for start in range(0, len(self._token_ids), self._step):
            part = slice(start, start + self._step)
            new, number = self._token_ids[part], sampling_params.logprobs
            reported = None if number is None else lists(self._log_probs[part], new, number)
            finish = "stop" if part.stop >= len(self._token_ids) else None
            self.output_processor.process_outputs([EngineCoreOutput(state.request_id, new, reported, finish)])
            assert state.output is not None
            yield state.output
