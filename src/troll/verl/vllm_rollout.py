"""Old policies from vLLM itself: its top-K log-probabilities of every sampled token, for ``anchor: rollout``.

verl imports this module in every process if ``VERL_USE_EXTERNAL_MODULES=troll.verl.vllm_rollout`` is set. It puts a
replica in the place of verl's own under the name ``vllm``, which does what verl's does, and whose server also reports
the distributions it sampled from. They travel beside the completion, in its extra fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from troll import PackedPolicy, capture_top
from troll.trust_region.policy.wire import to_records
from troll.verl.old_policies import OLD_POLICIES

#: The key under ``actor_rollout_ref.rollout.custom``.
CUSTOM = "trust_region"


def old_policy_record(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    top_log_probs: Sequence[Mapping[int, float]],
    *,
    vocab_size: int,
    top_k: int,
    mass_threshold: float,
) -> Tensor:
    """One completion's old policies as a record, for the extra field `OLD_POLICIES` of a rollout's output.

    Args:
        token_ids: The sampled tokens, T.
        log_probs: Their log-probabilities, T, in nats.
        top_log_probs: For each of them, ids and log-probabilities of the most likely tokens, as an engine reports them:
            with the sampled token or without.
        vocab_size: V.
        top_k: K.
        mass_threshold: δ.

    Raises:
        ValueError: If the numbers are not log-probabilities, or there are not equally many of each.
    """
    width = max((len(entries) for entries in top_log_probs), default=1)
    ids = torch.full((len(token_ids), width), -1)
    top = torch.full((len(token_ids), width), -torch.inf)
    for row, entries in zip(range(len(token_ids)), top_log_probs, strict=True):
        ids[row, : len(entries)] = torch.tensor(list(entries))
        top[row, : len(entries)] = torch.tensor(list(entries.values()))
    sampled, own = torch.tensor(token_ids, dtype=torch.int64), torch.tensor(log_probs, dtype=torch.float32)
    policy = capture_top(ids, top, sampled, own, vocab_size, top_k=top_k, mass_threshold=mass_threshold)
    (record,) = to_records(PackedPolicy.of(policy), [len(token_ids)])
    return record


class TopLogProbs:
    """A vLLM engine that is asked for more log-probabilities than the caller wants, and keeps them for each request.

    Args:
        engine: Of which everything else is used as it is.
        number: Log-probabilities for each sampled token, beside its own.
    """

    def __init__(self, engine: Any, number: int) -> None:
        self._engine, self._number = engine, number
        self._reported: dict[str, list[Mapping[int, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, request_id: str, **inputs: Any) -> AsyncIterator[Any]:
        """The engine's own outputs."""
        if sampling_params.logprobs is not None:
            sampling_params.logprobs = self._number
        async for output in self._engine.generate(sampling_params=sampling_params, request_id=request_id, **inputs):
            if output.outputs and output.outputs[0].logprobs is not None:
                self._reported[request_id] = output.outputs[0].logprobs
            yield output

    def taken(self, request_id: str) -> list[dict[int, float]] | None:
        """What the engine reported of a request, and forgets: by token, ids and log-probabilities in nats."""
        reported = self._reported.pop(request_id, None)
        if reported is None:
            return None
        return [{token: entry.logprob for token, entry in entries.items()} for entries in reported]


def reporting(server_class: type) -> type:
    """A server class of verl's whose completions bring their old policies along.

    Raises:
        RuntimeError: In generation, if the engine reported no log-probabilities.
    """

    class ReportingServer(server_class):
        @property
        def engine(self) -> TopLogProbs:
            return self._reporting_engine

        @engine.setter
        def engine(self, engine: Any) -> None:
            self._reporting_engine = TopLogProbs(engine, self.config.custom[CUSTOM]["top_k"])

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            # vLLM's own cap is 20, and a request for more fails.
            engine_kwargs.setdefault("max_logprobs", self.config.custom[CUSTOM]["top_k"])

        async def generate(
            self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **inputs: Any
        ) -> Any:
            output = await super().generate(
                prompt_ids=prompt_ids, sampling_params=sampling_params, request_id=request_id, **inputs
            )
            reported = self.engine.taken(request_id)
            if not output.token_ids:  # aborted
                return output
            if reported is None:
                raise RuntimeError(
                    "the rollout reported no log-probabilities, which anchor=rollout needs: set "
                    "actor_rollout_ref.rollout.calculate_log_probs=True"
                )
            settings = self.config.custom[CUSTOM]
            # In a thread, since this loop serves every request.
            output.extra_fields[OLD_POLICIES] = await asyncio.to_thread(
                old_policy_record,
                output.token_ids,
                output.log_probs,
                reported,
                vocab_size=self.model_config.hf_config.get_text_config().vocab_size,
                top_k=settings["top_k"],
                mass_threshold=settings["mass_threshold"],
            )
            return output

    return ReportingServer


def _load_replica() -> type[RolloutReplica]:
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class ReportingReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            custom = self.config.custom or {}
            if custom.get(CUSTOM, {}).get("anchor") == "rollout":
                self.server_class = ray.remote(reporting(vLLMHttpServer))

    return ReportingReplica


RolloutReplicaRegistry.register("vllm", _load_replica)
