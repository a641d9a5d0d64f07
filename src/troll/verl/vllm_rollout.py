"""Old policies from vLLM: the top-K log-probabilities at every sampled token, for `anchor: rollout`.

`troll.verl.plugin` puts `server_class` in the place of verl's own server: it does the same, and also reports the
distributions from which it sampled. `troll.verl.agent_loop` carries them into the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from torch import Tensor

from troll import Truncation
from troll.verl.old_policies import OLD_POLICIES
from troll.verl.reported import old_policy_record
from troll.verl.seam.vllm import TopLogProbs, vllm_server

#: The key of our settings under `actor_rollout_ref.rollout.custom`.
CUSTOM = "trust_region"


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

        # verl assigns `self.engine` once vLLM has started; the setter wraps it.
        @engine.setter
        def engine(self, engine: Any) -> None:
            # vLLM crashes on a request for more log-probabilities than the vocabulary has.
            self._number = min(self._settings["top_k"], self._vocab_size)
            self._reporting_engine = TopLogProbs(engine, self._number)

        @property
        def _settings(self) -> Any:
            return self.config.custom[CUSTOM]

        @property
        def _vocab_size(self) -> int:
            return self.model_config.hf_config.get_text_config().vocab_size

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            # vLLM's own cap is 20, and a request for more fails.
            engine_kwargs.setdefault("max_logprobs", self._settings["top_k"])

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
            # In a thread, since this loop serves every request.
            output.extra_fields[OLD_POLICIES] = await asyncio.to_thread(
                old_policy_record,
                *_checked(reported, output.token_ids, self._number),
                vocab_size=self._vocab_size,
                top_k=self._settings["top_k"],
                mass_threshold=self._settings["mass_threshold"],
                truncated=as_trained and not Truncation(max(self.config.top_k, 0), self.config.top_p).keeps_all,
                temperature=sampling_params.get("temperature"),
            )
            return output

    return ReportingServer


def _checked(reported: tuple[Tensor, Tensor] | None, token_ids: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
    """The report for a completion; raises RuntimeError unless it is of these tokens, with `number` others for each."""
    if reported is None:
        raise RuntimeError(
            "the rollout reported no log-probabilities, which anchor=rollout needs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    ids, _ = reported
    if ids[:, 0].tolist() != list(token_ids):
        raise RuntimeError(
            f"vLLM reported log-probabilities of {len(ids)} tokens that are not the {len(token_ids)} of its "
            "completion: set actor_rollout_ref.actor.policy_loss.anchor=old"
        )
    if (found := ids.shape[1] - 1) < number:
        raise RuntimeError(
            f"vLLM was asked for {number} log-probabilities a token, and it reported {found}: set "
            f"actor_rollout_ref.actor.policy_loss.top_k={found}"
        )
    return reported


def server_class() -> Any:
    """The Ray class of verl's vLLM server, extended so that it reports."""
    return ray.remote(reporting(vllm_server()))
