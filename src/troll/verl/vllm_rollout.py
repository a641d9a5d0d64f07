"""Old policies from vLLM: the top-K log-probabilities at every sampled token, for `anchor: rollout`.

`troll.verl.plugin` puts `server_class` in the place of verl's own server: it does the same, and also reports the
distributions from which it sampled. `troll.verl.agent_loop` carries them into the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from troll import Truncation
from troll.verl.old_policies import OLD_POLICIES
from troll.verl.reported import old_policy_record
from troll.verl.seam.rollout import vllm_server

#: The key of our settings under `actor_rollout_ref.rollout.custom`.
CUSTOM = "trust_region"


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


def reporting(server_class: type) -> type:
    """Extends a server class of verl's so that completions carry their old policies.

    Raises:
        RuntimeError: In generation, if the engine reported no log-probabilities, fewer than it was asked for, or not
            those of the completion.
    """

    class ReportingServer(server_class):
        @property
        def engine(self) -> TopLogProbs:
            return self._reporting_engine

        @engine.setter
        def engine(self, engine: Any) -> None:
            # vLLM crashes on a request for more log-probabilities than the vocabulary has.
            self._number = min(self.config.custom[CUSTOM]["top_k"], self._vocab_size())
            self._reporting_engine = TopLogProbs(engine, self._number)

        def _vocab_size(self) -> int:
            return self.model_config.hf_config.get_text_config().vocab_size

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            # vLLM's own cap is 20, and a request for more fails.
            engine_kwargs.setdefault("max_logprobs", self.config.custom[CUSTOM]["top_k"])

        async def generate(
            self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **inputs: Any
        ) -> Any:
            # Validation may sample in another way. Its records are not trained on, and may be of any form.
            names = "top_p", "top_k", "temperature"  # at temperature 0 vLLM truncates nothing
            as_trained = all(sampling_params.get(name) == getattr(self.config, name) for name in names)
            try:
                output = await super().generate(
                    prompt_ids=prompt_ids, sampling_params=sampling_params, request_id=request_id, **inputs
                )
            finally:
                reported = self.engine.taken(request_id)
            if not output.token_ids:  # aborted
                return output
            if reported is None:
                raise RuntimeError(
                    "the rollout reported no log-probabilities, which anchor=rollout needs: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=True"
                )
            if reported[0][:, 0].tolist() != list(output.token_ids):
                raise RuntimeError(
                    f"vLLM reported log-probabilities of {len(reported[0])} tokens that are not the "
                    f"{len(output.token_ids)} of its completion: set actor_rollout_ref.actor.policy_loss.anchor=old"
                )
            if (number := reported[0].shape[1] - 1) < self._number:
                raise RuntimeError(
                    f"vLLM was asked for {self._number} log-probabilities a token, and it reported {number}: "
                    f"set actor_rollout_ref.actor.policy_loss.top_k={number}"
                )
            settings = self.config.custom[CUSTOM]
            # In a thread, since this loop serves every request.
            output.extra_fields[OLD_POLICIES] = await asyncio.to_thread(
                old_policy_record,
                *reported,
                vocab_size=self._vocab_size(),
                top_k=settings["top_k"],
                mass_threshold=settings["mass_threshold"],
                truncated=as_trained and not Truncation(max(self.config.top_k, 0), self.config.top_p).keeps_all,
            )
            return output

    return ReportingServer


def server_class() -> Any:
    """The Ray class of verl's vLLM server, extended so that it reports."""
    return ray.remote(reporting(vllm_server()))
