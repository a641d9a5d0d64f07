"""The parts of vLLM, and of verl's server of it, that we build on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import troll.verl.seam.rollout  # noqa: F401 (checks that a server's answers have extra fields)
from troll.needed import Needed
from troll.verl.seam import check


def vllm_server() -> type:
    """The vLLM server of verl, whose module needs vLLM.

    Raises:
        ImportError: If it is not there, or lacks something.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    server: type = vLLMHttpServer
    check(
        (
            Needed(server, "_preprocess_engine_kwargs", "allowing for the top K"),
            Needed(server, "generate", "the report of a completion", ("prompt_ids", "sampling_params", "request_id")),
        )
    )
    return server


class TopLogProbs:
    """A vLLM engine that returns only the sampled token's log-probability, and keeps the top K as arrays.

    vLLM's frontend turns every log-probability into text and Python objects: at K = 64 that takes longer than the pass
    for old log-probabilities that it saves. So this class takes the arrays as they arrive from the engine's process,
    and passes only the sampled token's entry to the frontend.

    Args:
        engine: vLLM's `AsyncLLM`; everything else passes through to it. Besides `generate`, this uses of vLLM 0.24:
            `output_processor.process_outputs(outputs, ...)`, where each output has a `request_id` and, for every new
            token, `new_logprobs` (`LogprobsLists`: arrays (tokens, 1 + K) of ids and log-probabilities, the sampled
            token's first); and `output_processor.request_states[request_id].external_req_id`, the id of `generate`.
        number: K, the log-probabilities to report of each sampled token, not counting its own.

    Raises:
        RuntimeError: If the engine has no such output processor.
    """

    def __init__(self, engine: Any, number: int) -> None:
        self._engine, self._number = engine, number
        self._arrays: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        processor: Any = getattr(engine, "output_processor", None)
        if not (hasattr(processor, "process_outputs") and hasattr(processor, "request_states")):
            raise RuntimeError(
                f"{type(engine).__module__}.{type(engine).__name__} has no output_processor as vLLM 0.24 has it, where "
                "anchor=rollout takes its log-probabilities: install the vLLM that verl asks for, or set anchor=old"
            )
        self._states, self._process = processor.request_states, processor.process_outputs
        processor.process_outputs = self._process_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, request_id: str, **inputs: Any) -> AsyncIterator[Any]:
        """Yields the engine's own outputs."""
        if sampling_params.logprobs is not None:
            sampling_params.logprobs = self._number
            self.expect(request_id)
        if not sampling_params.stop:  # verl reads no text, and only stop strings need it
            sampling_params.detokenize = False
        async for output in self._engine.generate(sampling_params=sampling_params, request_id=request_id, **inputs):
            yield output

    def expect(self, *request_ids: str) -> None:
        """Keeps the log-probabilities that the engine reports for these requests from now on."""
        self._arrays.update((request_id, ([], [])) for request_id in request_ids)

    def taken(self, request_id: str) -> tuple[Tensor, Tensor] | None:
        """Removes and returns the report for a request: ids and log-probabilities in nats, (T, 1 + K) each."""
        arrays = self._arrays.pop(request_id, ([], []))
        if not arrays[0]:
            return None
        ids, log_probs = (torch.from_numpy(np.concatenate(rows)) for rows in arrays)
        return ids, log_probs

    def _process_outputs(self, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            state = self._states.get(output.request_id)
            arrays = None if state is None else self._arrays.get(state.external_req_id)
            lists = output.new_logprobs
            if arrays is None or lists is None:
                continue
            ids, log_probs = lists.logprob_token_ids, lists.logprobs
            # Copied, since these are views of a whole message.
            arrays[0].append(ids[:, : self._number + 1].copy())
            arrays[1].append(log_probs[:, : self._number + 1].copy())
            output.new_logprobs = lists._replace(logprob_token_ids=ids[:, :1], logprobs=log_probs[:, :1])
        return self._process(engine_core_outputs, *args, **kwargs)
